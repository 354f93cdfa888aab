"""Show another model, with its attributes and methods, and refuse those that cannot be shown."""
