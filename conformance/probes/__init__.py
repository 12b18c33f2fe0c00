"""The probes: the same spec with inputs made so that a given kind of fault cannot hide."""
