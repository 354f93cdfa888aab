"""Run the steps of a Keras model on towers."""
