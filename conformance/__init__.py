"""Build a case, run it in isolation, judge it, explain it."""
