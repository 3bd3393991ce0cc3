"""Standalone PySpark jobs: the streaming, stateful and file-level forms of the patterns."""
