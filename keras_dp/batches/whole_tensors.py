"""Tell tensors of a batch that are cut by rows from tensors that stay whole."""

import dataclasses
from typing import Any

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class WholeTensors:
    """Finds the tensors of a batch that stay whole; all others are cut by rows, their first axis.

    Tensors without an axis stay whole, and so do tensors that the user names. This depends on the structure of a batch and on
    the names, never on the sizes of a batch. All tensors that are cut must have the same number of rows.

    Attributes:
        names: the names of tensors or nested structures: a key of a dictionary, an index of a tuple, or a path of these, such
            as "edges", "1" or "0/edges".
    """

    names: tuple[str, ...] = ()

    def of(self, batch: Any) -> list[bool]:
        """Returns whether each leaf of a nested batch, a tensor or its type, stays whole."""
        return [self._is_whole(path, leaf) for path, leaf in keras.tree.flatten_with_path(batch)]

    def cut_leaves(self, batch: Any) -> dict[str, Any]:
        """Returns the leaves of a nested batch that are cut, by their paths."""
        leaves = zip(keras.tree.flatten_with_path(batch), self.of(batch), strict=True)
        return {path_name(path): leaf for (path, leaf), is_whole in leaves if not is_whole and hasattr(leaf, "shape")}

    def _is_whole(self, path: tuple[Any, ...], leaf: Any) -> bool:
        if getattr(leaf, "shape", tf.TensorShape(None)).rank == 0:
            return True
        return any(f"/{name.strip('/')}/" in f"/{path_name(path)}/" for name in self.names)


def path_name(path: tuple[Any, ...]) -> str:
    """Joins the keys and indices that lead to a leaf, as in "0/edges"."""
    return "/".join(map(str, path))
