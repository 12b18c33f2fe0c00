"""The operator matrix: which cells exist, and in which tier."""
