"""Touch the few private names of Keras and TensorFlow, each guarded by a test."""
