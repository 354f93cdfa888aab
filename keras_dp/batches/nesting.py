"""Take nested batches apart into their tensors, and put others in their places."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from keras_dp.keras_internals.extension_types import components_of, is_extension_type, with_components

Path = tuple[Any, ...]


def flatten_with_path(batch: Any) -> list[tuple[Path, Any]]:
    """Returns the leaves of a nested batch with their paths, as `keras.tree.flatten_with_path` does.

    A value of a `tf.experimental.ExtensionType` is a nested structure, too: its leaves are its tensors, by the names of its
    fields.
    """
    return [
        (tuple(path) + inner, leaf)
        for path, outer in keras.tree.flatten_with_path(batch)
        for inner, leaf in _leaves_inside(outer)
    ]


def flatten(batch: Any) -> list[Any]:
    """Returns the leaves of a nested batch."""
    return [leaf for _, leaf in flatten_with_path(batch)]


def pack(batch: Any, leaves: Iterable[Any]) -> Any:
    """Packs other leaves in the structure of a nested batch of tensors or types."""
    following = iter(leaves)
    return keras.tree.pack_sequence_as(batch, [_filled(outer, following) for outer in keras.tree.flatten(batch)])


def map_leaves(function: Callable[..., Any], *batches: Any) -> Any:
    """Packs in the structure of the first batch what a function makes of the leaves of several batches."""
    return pack(batches[0], map(function, *map(flatten, batches)))


def _leaves_inside(outer: Any) -> Iterator[tuple[Path, Any]]:
    if not is_extension_type(outer):
        yield (), outer
        return
    for path, component in components_of(outer):
        for inner, leaf in _leaves_inside(component):
            yield path + inner, leaf


def _filled(outer: Any, following: Iterator[Any]) -> Any:
    if not is_extension_type(outer):
        return next(following)
    return with_components(outer, [_filled(component, following) for _, component in components_of(outer)])
