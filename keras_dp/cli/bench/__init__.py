"""Measure training steps: `keras-dp bench`."""
