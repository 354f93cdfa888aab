"""Save and load, in place of an object, the object that it shows."""

import functools
from collections.abc import Callable
from typing import Any

from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib
from tensorflow.lite.python import lite


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


def _of_shown(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function save or load, in place of each `SavedAs` among its positional arguments, the object that it shows."""

    def shown_of(argument: Any) -> Any:
        shown = argument._shown() if isinstance(argument, SavedAs) else None
        return argument if shown is None else shown

    @functools.wraps(function)
    def of_shown(*args: Any, **kwargs: Any) -> Any:
        return function(*map(shown_of, args), **kwargs)

    return of_shown


# All functions of Keras that save or load models and weights call one of these.
saving_lib._serialize_model_as_json = _of_shown(saving_lib._serialize_model_as_json)
saving_lib._save_state = _of_shown(saving_lib._save_state)
saving_lib._load_state = _of_shown(saving_lib._load_state)
legacy_h5_format.save_model_to_hdf5 = _of_shown(legacy_h5_format.save_model_to_hdf5)
# TensorFlow Lite finds a model's inputs by its class.
lite.TFLiteKerasModelConverterV2.__init__ = _of_shown(lite.TFLiteKerasModelConverterV2.__init__)
