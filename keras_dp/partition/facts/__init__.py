"""Describe what is known of a tensor before there is a batch."""
