"""Compile, pack and call the written graph."""
