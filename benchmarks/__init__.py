"""Measurements, side by side: one module a pattern, its committed results under `results/`."""
