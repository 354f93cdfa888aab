"""Show TensorFlow's checkpoints an object in place of another one with the same state."""

from typing import Any


class CheckpointedOptimizer:
    """Makes a model's checkpoints find the optimizer that the model shows, as `tf.train.Checkpoint(model, optimizer=...)` asks.

    The model keeps another optimizer with the same variables.
    """

    __slots__ = ()

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        kept: Any = super()._lookup_dependency(name, *args, **kwargs)  # type: ignore[misc]
        # A program may set the first one now, before the model shows any.
        return kept if kept is None or name != "optimizer" else getattr(self, "optimizer", kept)

    def _trackable_children(self, *args: Any, **kwargs: Any) -> Any:
        children: Any = super()._trackable_children(*args, **kwargs)  # type: ignore[misc]
        return children | {"optimizer": self.optimizer} if "optimizer" in children else children  # type: ignore[attr-defined]
