"""Decide what home and each tower compute, what they exchange, and what waits for what."""
