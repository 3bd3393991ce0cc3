"""Everything that is not Spark and runs beside it: Kafka, PostgreSQL, Debezium, S3, a cluster, the demo's runner."""
