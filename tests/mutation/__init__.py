"""Check that tests notice small faults in the modules of the partitioner that decide results (mutation testing)."""
