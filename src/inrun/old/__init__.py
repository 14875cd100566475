"""The engine before issue 36, until the new one has taken its place everywhere."""
