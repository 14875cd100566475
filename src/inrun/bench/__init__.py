"""Throughput and memory of every method beside plain training, on the user's own machine and shape."""
