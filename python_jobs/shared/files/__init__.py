"""Sets of files: sources, pointers, manifests and readiness markers."""
