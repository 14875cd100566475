"""The smallest honest run: `inrun demo`."""
