"""Save and load, in place of an object, the object that it shows."""

import functools
from collections.abc import Callable
from typing import Any

from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib


class SavedAs:
    """Makes files of Keras and TensorFlow hold the object that `_shown` returns, in place of this one."""

    def _shown(self) -> Any:
        raise NotImplementedError

    def _trackable_children(self, *args: Any, **kwargs: Any) -> Any:
        shown: Any = self._shown() or super()
        return shown._trackable_children(*args, **kwargs)

    def _lookup_dependency(self, *args: Any, **kwargs: Any) -> Any:
        shown: Any = self._shown() or super()
        return shown._lookup_dependency(*args, **kwargs)

    @property
    def _default_save_signature(self) -> Any:
        return self._shown()._default_save_signature

    def _get_save_spec(self, dynamic_batch: bool = True) -> Any:
        if not dynamic_batch:
            raise ValueError(
                "TensorFlow Lite's converter cannot find all inputs of a wrapped model. Give it the inner model: "
                "tf.lite.TFLiteConverter.from_keras_model(parallel.inner_model)."
            )
        return self._shown()._get_save_spec(dynamic_batch)

    @property
    def _build_shapes_dict(self) -> dict[str, Any] | None:
        """The input's shape for TensorFlow Lite's converter, if there is a single input, of the model's `input_dtype`."""
        shown = self._shown()
        inputs = getattr(shown, "inputs", None)
        if inputs is None:
            return getattr(shown, "_build_shapes_dict", None)
        return {"input_shape": inputs[0].shape} if [x.dtype for x in inputs] == [shown.input_dtype] else None

    @_build_shapes_dict.setter
    def _build_shapes_dict(self, value: Any) -> None:
        pass  # Keras sets it on every layer.


def _of_shown(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of Keras save or load the object that a `SavedAs` shows, as its first argument."""

    @functools.wraps(function)
    def of_shown(saved: Any, *args: Any, **kwargs: Any) -> Any:
        shown = saved._shown() if isinstance(saved, SavedAs) else None
        return function(saved if shown is None else shown, *args, **kwargs)

    return of_shown


# All functions of Keras that save or load models and weights call one of these.
saving_lib._serialize_model_as_json = _of_shown(saving_lib._serialize_model_as_json)
saving_lib._save_state = _of_shown(saving_lib._save_state)
saving_lib._load_state = _of_shown(saving_lib._load_state)
legacy_h5_format.save_model_to_hdf5 = _of_shown(legacy_h5_format.save_model_to_hdf5)
