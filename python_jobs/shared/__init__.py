"""What several families need; no module here imports a family."""
