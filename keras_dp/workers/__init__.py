"""Train one model by several processes, on one machine or several."""
