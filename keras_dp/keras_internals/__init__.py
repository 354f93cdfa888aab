"""The few private names of Keras and TensorFlow that keras_dp must touch, each guarded by a test."""
