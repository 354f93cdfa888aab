"""Work for a long time, and look for growth."""
