"""Define published kinds of training programs, most with custom steps, which must train on towers as on one device."""
