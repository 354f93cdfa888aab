"""Propagate placements from the batch to the results, by a rule for each operation."""
