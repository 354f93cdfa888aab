"""Register the rules by family; the README beside this file tells how to add one."""

from keras_dp.partition.placing.rules import (
    drawing,
    elementwise,
    indexing,
    lists,
    own,
    picking,
    products,
    recurrent,
    reductions,
    reshaping,
    windows,
)
from keras_dp.partition.placing.rules.registry import RULES

__all__ = [
    "RULES",
    "drawing",
    "elementwise",
    "indexing",
    "lists",
    "own",
    "picking",
    "products",
    "recurrent",
    "reductions",
    "reshaping",
    "windows",
]
