"""What is checked while a run is scored: rows, coverage, gradients, conservation."""
