"""Processes, on one machine or several, that train one model together."""
