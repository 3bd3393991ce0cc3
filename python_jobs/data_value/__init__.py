"""Adding to the value of data: enrichment, decoration, aggregation, sessions, order."""
