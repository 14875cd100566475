"""The engine: from the backward of a step to the credits of its samples."""
