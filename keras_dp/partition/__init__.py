"""Partition a traced step by rows: several towers compute what one device would. Knows TensorFlow alone."""
