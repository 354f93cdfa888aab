"""Let an object stand in the place of a model or an optimizer, with the same state."""
