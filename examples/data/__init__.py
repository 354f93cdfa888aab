"""The images that the examples train on."""
