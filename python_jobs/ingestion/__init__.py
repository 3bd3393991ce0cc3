"""Getting data into the lakehouse: loads, replication, readiness and triggers."""
