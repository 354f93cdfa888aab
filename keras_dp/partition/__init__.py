"""Partition a traced step by rows, knowing TensorFlow alone."""
