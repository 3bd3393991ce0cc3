"""Streaming: ingestion endpoints, synchronizers, live state, and reprocessing of streams."""
