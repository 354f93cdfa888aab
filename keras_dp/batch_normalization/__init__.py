"""Batch normalization of the global batch, or of each slice."""
