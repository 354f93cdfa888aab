"""Show another object as one's own, and refuse those that cannot be wrapped."""
