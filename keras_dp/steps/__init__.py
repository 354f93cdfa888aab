"""Steps of a Keras model, run on towers."""
