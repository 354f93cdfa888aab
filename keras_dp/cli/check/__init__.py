"""Check whether data parallelism works on this machine, with this model: `keras-dp check`."""
