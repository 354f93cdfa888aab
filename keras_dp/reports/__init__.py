"""Report what a step sends, and whether it is exact."""
