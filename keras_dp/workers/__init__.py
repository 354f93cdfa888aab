"""Train one model with several processes, on one or more machines."""
