"""Tell the tensors of a batch that are cut by rows from those that stay whole."""

import dataclasses
from typing import Any

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class WholeTensors:
    """Says which tensors of a batch stay whole; all others are cut by rows, their first axis.

    Tensors without an axis do, and those that are named. That depends on the structure of a batch and on what the user says,
    never on the sizes of one batch: all tensors that are cut must have the same number of rows.

    Attributes:
        names: of tensors, or of structures of them: a key of a dictionary or an index of a tuple, or several of those that
            follow each other, such as "edges", "1" or "0/edges".
    """

    names: tuple[str, ...] = ()

    def of(self, batch: Any) -> list[bool]:
        """For each leaf of a nested batch, of tensors or their types, whether it stays whole."""
        return [self._is_whole(path, leaf) for path, leaf in keras.tree.flatten_with_path(batch)]

    def cut_leaves(self, batch: Any) -> dict[str, Any]:
        """The leaves of a nested batch that are cut, by their paths."""
        leaves = zip(keras.tree.flatten_with_path(batch), self.of(batch), strict=True)
        return {path_name(path): leaf for (path, leaf), is_whole in leaves if not is_whole and hasattr(leaf, "shape")}

    def _is_whole(self, path: tuple[Any, ...], leaf: Any) -> bool:
        if getattr(leaf, "shape", tf.TensorShape(None)).rank == 0:
            return True
        return any(f"/{name.strip('/')}/" in f"/{path_name(path)}/" for name in self.names)


def path_name(path: tuple[Any, ...]) -> str:
    """The keys and indices that lead to a leaf, as they are written."""
    return "/".join(map(str, path))
