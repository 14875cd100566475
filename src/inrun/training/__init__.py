"""The reference model and what trains it."""
