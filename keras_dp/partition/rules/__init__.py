"""Rules by family. To add one, see the README beside this file."""

from keras_dp.partition.rules import (
    drawing,
    elementwise,
    indexing,
    lists,
    own,
    picking,
    products,
    reductions,
    reshaping,
    windows,
)
from keras_dp.partition.rules.registry import RULES

__all__ = [
    "RULES",
    "drawing",
    "elementwise",
    "indexing",
    "lists",
    "own",
    "picking",
    "products",
    "reductions",
    "reshaping",
    "windows",
]
