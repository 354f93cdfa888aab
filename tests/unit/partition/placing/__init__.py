"""Tests of the partition."""
