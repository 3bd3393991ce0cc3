"""Failures, command line, clock, intervals, retries: needs no pyspark and no other room."""
