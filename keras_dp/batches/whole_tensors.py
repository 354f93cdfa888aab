"""Tell tensors of a batch that are cut by rows from tensors that stay whole."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from keras_dp.batches.nesting import flatten_with_path
from keras_dp.choices import question


@dataclasses.dataclass(frozen=True)
class WholeTensors:
    """Finds the tensors of a batch that stay whole; all others are cut by rows, their first axis.

    Tensors without an axis stay whole, and so do tensors that the user names, or that are listed. All tensors that are cut must
    have the same number of rows.

    Attributes:
        names: the names of tensors or nested structures: a key of a dictionary, a field of a `tf.experimental.ExtensionType`,
            an index of a tuple, or a path of these, such as "edges", "1" or "0/edges". A name that begins with a key names
            every tensor below such a key. A name that begins with an index is the path from the batch, which is
            (x, y, sample_weight).
        paths: the paths of further tensors that stay whole.
    """

    names: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()

    def of(self, batch: Any) -> list[bool]:
        """Returns whether each leaf of a nested batch, a tensor or its type, stays whole."""
        return [self._is_whole(path, leaf) for path, leaf in leaves_of(batch)]

    def cut_leaves(self, batch: Any) -> dict[str, Any]:
        """Returns the leaves of a nested batch that are cut, by their paths."""
        return {path: leaf for path, leaf in leaves_of(batch) if not self._is_whole(path, leaf) and hasattr(leaf, "shape")}

    def whole_leaves(self, batch: Any) -> dict[str, Any]:
        """Returns the leaves of a nested batch that stay whole although they have an axis, by their paths."""
        return {path: leaf for path, leaf in leaves_of(batch) if self._is_whole(path, leaf) and not _is_scalar(leaf)}

    def _is_whole(self, path: str, leaf: Any) -> bool:
        return _is_scalar(leaf) or path in self.paths or any(has_name(path, name) for name in self.names)


class WholeNames:
    """Remembers which names of tensors that stay whole no batch has had yet: these may be misspelled.

    Args:
        names: the names, as in `WholeTensors`.
    """

    def __init__(self, names: Collection[str]):
        self._names = tuple(names)
        self._missing = list(names)

    def see(self, batch: Any, has_all: bool) -> None:
        """Looks for the names in a batch of tensors or of their types.

        Args:
            batch: the batch.
            has_all: whether the batch should have all names that no earlier batch had. The batches of training should.
                Predictions have no targets, and evaluations may have fewer tensors than training.

        Raises:
            ValueError: if the batch should have all names, and lacks one.
        """
        paths = [path for path, _ in leaves_of(batch)]
        self._missing = [name for name in self._missing if not any(has_name(path, name) for path in paths)]
        if has_all and self._missing:
            name = self._missing[0]
            keys = [key for path in paths for key in path.split("/") if not key.isdecimal()]
            raise ValueError(
                f"`whole` names {name!r}, but the batch has no such tensor.{question(name, [*keys, *paths])} Its tensors are "
                f"{', '.join(map(repr, paths))}; a key, or the beginning of a path, names all tensors below it. Received: "
                f"whole={list(self._names)}"
            )


def chosen_whole(names: Sequence[str]) -> WholeTensors:
    """Returns the tensors that a user names.

    Raises:
        ValueError: if these are no names.
    """
    if isinstance(names, str) or not all(isinstance(name, str) and name.strip("/") for name in names):
        raise ValueError(f'`whole` lists names of tensors of a batch, such as whole=["edges"]. Received: whole={names!r}')
    return WholeTensors(tuple(names))


def leaves_of(batch: Any) -> list[tuple[str, Any]]:
    """Returns the leaves of a nested batch with their paths, such as "0/edges". A batch that is no tuple is x, of path "0"."""
    in_tuple = batch if isinstance(batch, tuple) else (batch,)
    return [("/".join(map(str, path)), leaf) for path, leaf in flatten_with_path(in_tuple)]


def has_name(path: str, name: str) -> bool:
    """Returns whether a path of a tensor has a name, as in `WholeTensors`."""
    name = name.strip("/")
    if name.split("/")[0].isdecimal():
        return f"{path}/".startswith(f"{name}/")
    return f"/{name}/" in f"/{path}/"


def _is_scalar(leaf: Any) -> bool:
    return getattr(leaf, "shape", tf.TensorShape(None)).rank == 0
