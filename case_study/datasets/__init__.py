"""Data sets to prove and measure the patterns on."""
