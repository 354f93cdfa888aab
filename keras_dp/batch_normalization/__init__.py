"""Normalize with the moments of the global batch, or of each slice."""
