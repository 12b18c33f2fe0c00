"""The gates: one module per requirement, each a plain function from observations to findings."""
