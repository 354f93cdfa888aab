"""Draw random TensorFlow programs over rows, and compare them partitioned with plain, as compilers are tested."""
