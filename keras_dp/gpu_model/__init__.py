"""Model what a step would do on GPUs, without one."""
