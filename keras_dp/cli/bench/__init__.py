"""Measure steps, or whole trainings: `keras-dp bench`."""
