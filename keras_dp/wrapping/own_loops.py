"""Run a model's own `fit`, `evaluate` and `predict` with steps on towers."""

import functools
import logging
import weakref
from collections.abc import Callable, Collection
from typing import Any

import keras
import tensorflow as tf

STEPS = ("train_step", "test_step", "predict_step")
CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
FUNCTIONS = ("make_train_function", "make_test_function", "make_predict_function")

logger = logging.getLogger("keras_dp")


def is_own(model: keras.Model, name: str) -> bool:
    """Returns whether a model overrides a method of `keras.Model`."""
    method = getattr(model, name)
    return getattr(method, "__func__", method) is not getattr(keras.Model, name)


def own_loops(model: keras.Model) -> list[str]:
    """Lists which of `fit`, `evaluate`, `predict`, `*_on_batch` and `make_*_function` a model overrides."""
    return [name for name in (*CALLS, *FUNCTIONS) if is_own(model, name)]


def view_for_loops(model: keras.Model, wrapper: Any, shared: Collection[str]) -> Any:
    """Returns a view of a model for its own loops, in which `super().fit()` and `self.train_step()` call a wrapper.

    The view has the model's attributes, since the two share one `__dict__`. Its class derives from the model's class and from
    `OnTowers`, which answers in place of `keras.Model`: it comes right before `keras.Model` in the method resolution order, in
    which `super()` goes through the classes.

    Args:
        model: the inner model.
        wrapper: the wrapper around it, which trains, evaluates and predicts on towers.
        shared: the names of attributes that Keras's loops keep on the wrapper.
    """
    own_class = type(model)
    loops = own_loops(model)
    reference = weakref.ref(wrapper)
    above = type("OnTowers", (keras.Model,), {name: _of_wrapper(name, reference) for name in (*CALLS, *FUNCTIONS)})
    below: dict[str, Any] = {name: _told_if_alone(getattr(own_class, name), reference) for name in loops}
    below |= {name: _step_on_towers(name, reference) for name in STEPS}
    below |= {name: _of_wrapper(name, reference) for name in ("compile", "save", "save_weights", "export")}
    below |= {name: _kept_on_wrapper(name, reference) for name in shared}
    # Code that asks the view for its class, to make another model, gets the model's class.
    below |= {"__new__": _instance_of(own_class), "__class__": property(lambda view: own_class)}
    names = {name: getattr(own_class, name) for name in ("__doc__", "__module__", "__qualname__")}
    view: Any = object.__new__(type(own_class.__name__, (own_class, above), {**names, **below}))
    object.__setattr__(view, "__dict__", vars(model))
    return view


def _of_wrapper(name: str, wrapper: Callable[[], Any]) -> Any:
    """Returns a method that calls the wrapper's class. On its instance, the name might lead to the model's own method again."""

    @functools.wraps(getattr(keras.Model, name))
    def method(view: Any, *args: Any, **kwargs: Any) -> Any:
        on_towers = wrapper()
        on_towers._calls_on_towers += 1
        return getattr(type(on_towers), name)(on_towers, *args, **kwargs)

    return method


def _step_on_towers(name: str, wrapper: Callable[[], Any]) -> Any:
    """Returns a step that a loop can call directly with a batch, eagerly or in a function that it compiles."""

    @functools.wraps(getattr(keras.Model, name))
    def step(view: Any, data: Any) -> Any:
        on_towers = wrapper()
        on_towers._calls_on_towers += 1
        run = getattr(on_towers, name)
        return run(data) if tf.executing_eagerly() else on_towers.distribute_strategy.run(run, (data,))

    # A property answers before an attribute of that name, which the program may have set on the model.
    return property(lambda view: functools.partial(step, view), lambda view, value: setattr(wrapper(), name, value))


def _told_if_alone(method: Callable[..., Any], wrapper: Callable[[], Any]) -> Any:
    """Wraps one of the model's own loops, so that it warns if it has computed nothing on towers."""

    @functools.wraps(method)
    def loop(view: Any, *args: Any, **kwargs: Any) -> Any:
        on_towers = wrapper()
        before = on_towers._calls_on_towers
        result = method(view, *args, **kwargs)
        if on_towers._calls_on_towers == before and method.__name__ in CALLS:
            logger.warning(
                "The model's own %s() ran on one device: it called neither super().%s(), nor train_on_batch(), "
                "train_step() or similar methods, which run on the towers.",
                *(method.__name__, method.__name__),
            )
        return result

    return loop


def _kept_on_wrapper(name: str, wrapper: Callable[[], Any]) -> property:
    return property(
        lambda view: getattr(wrapper(), name),
        lambda view, value: setattr(wrapper(), name, value),
        lambda view: delattr(wrapper(), name),
    )


def _instance_of(own_class: type) -> Any:
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return own_class(*args, **kwargs)

    return new
