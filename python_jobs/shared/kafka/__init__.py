"""Kafka topics: settings, plain clients, Spark's admin client, bronze records."""
