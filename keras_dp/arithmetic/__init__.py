"""Count the arithmetic of a step, and the share of it that towers divide among themselves."""
