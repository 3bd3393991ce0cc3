"""Error management: records that can't be processed, rows that a filter rejects, and calls that fail."""
