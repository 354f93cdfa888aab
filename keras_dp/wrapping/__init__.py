"""Forward public names to an object inside, and refuse objects that cannot be wrapped."""
