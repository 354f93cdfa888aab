"""Cut global batches into slices, and feed them to the towers."""
