"""Measure how many images per second a model trains on."""

import time

import keras


class Throughput(keras.callbacks.Callback):
    """Prints images per second, measured from the end of the first step, which traces the model, to the end of training.

    Args:
        images: the number of images in an epoch.
        batch_size: the number of images in the first step.
    """

    def __init__(self, images, batch_size):
        super().__init__()
        self.images = images
        self.batch_size = batch_size
        self.start = None

    def on_train_batch_end(self, batch, logs=None):
        """Starts the clock after the first step."""
        if self.start is None:
            self.start = time.perf_counter()

    def on_train_end(self, logs=None):
        """Stops the clock."""
        seconds = time.perf_counter() - self.start
        images = self.images * self.params["epochs"] - self.batch_size
        print(f"{images / seconds:.0f} images per second (all steps but the first)")
