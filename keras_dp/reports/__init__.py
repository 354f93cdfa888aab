"""Say what a step does: which bytes it sends, and whether its result is that of one device."""
