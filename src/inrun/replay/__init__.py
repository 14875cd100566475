"""Look back at a finished run: score its samples for validation data that arrived after it."""
