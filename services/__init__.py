"""The services that run next to Spark: Kafka, PostgreSQL, Debezium, S3, a cluster, the demo's runner."""
