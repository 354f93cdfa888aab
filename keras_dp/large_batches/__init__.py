"""Recipes for training with large batches."""
