"""Jobs that say what the other jobs did."""
