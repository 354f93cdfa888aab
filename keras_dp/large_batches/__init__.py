"""Train with large batches by published recipes."""
