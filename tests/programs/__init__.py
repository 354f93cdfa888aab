"""Training programs as people publish them, most with steps of their own: each must train on towers as on one device."""
