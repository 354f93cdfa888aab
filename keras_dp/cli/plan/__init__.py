"""Plan training on GPUs, without one: `keras-dp plan`."""
