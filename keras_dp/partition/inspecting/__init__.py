"""Explain, draw and check a partition, and find the operation that failed."""
