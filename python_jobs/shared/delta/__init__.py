"""Delta tables: names, commits, merges, overwrites, keys, streams and their checkpoints."""
