"""Data sets for the tests and benchmarks of the patterns."""
