"""Idempotency: jobs whose second run leaves what the first one left."""
