"""Find this machine's devices, and place variables on them."""
