"""Trace a step as one device does, and prepare its graph."""
