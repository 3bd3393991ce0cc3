"""Checks and generators that `make` calls; nothing here is needed to run a pattern."""
