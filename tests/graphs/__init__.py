"""Compare the graphs that two versions of the partitioner write: `python -m graphs`."""
