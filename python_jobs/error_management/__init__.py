"""Error management: records that can't be processed, and rows that a filter rejects."""
