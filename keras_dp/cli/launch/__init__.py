"""Start workers: `keras-dp launch`."""
