"""Measure steps per second: `keras-dp bench`."""
