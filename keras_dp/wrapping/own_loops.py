"""Run a model's own `fit`, `evaluate` and `predict` with steps on towers."""

import functools
import inspect
import logging
import types
import weakref
from collections.abc import Callable, Collection
from typing import Any

import keras
import tensorflow as tf

STEPS = ("train_step", "test_step", "predict_step")
CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_UPDATES = ("apply", "apply_gradients", "minimize")
FUNCTIONS = ("make_train_function", "make_test_function", "make_predict_function")

logger = logging.getLogger("keras_dp")


def is_own(model: keras.Model, name: str) -> bool:
    """Returns whether a model overrides a method of `keras.Model`."""
    method = getattr(model, name)
    return getattr(method, "__func__", method) is not getattr(keras.Model, name)


def own_loops(model: keras.Model) -> list[str]:
    """Lists which of `fit`, `evaluate`, `predict`, `*_on_batch` and `make_*_function` a model overrides."""
    return [name for name in (*CALLS, *FUNCTIONS) if is_own(model, name)]


def own_training(model: keras.Model) -> list[str]:
    """Lists the public methods that a user's class adds to `keras.Model`, and that train, evaluate or predict.

    Such a method names a step, a loop or the update of an optimizer in its code, or another such method, as a `train()` does
    that calls the class's own `step()`.
    """
    classes = [one for one in type(model).__mro__ if one not in keras.Model.__mro__ and not _is_of_keras(one)]
    added = {name: value for one in reversed(classes) for name, value in vars(one).items() if not hasattr(keras.Model, name)}
    names = {name: _names_in(code) for name, value in added.items() if (code := _code_of(value)) is not None}
    training, before = {*STEPS, *CALLS, *_UPDATES}, 0
    while len(training) > before:
        before = len(training)
        training |= {name for name in names if names[name] & training}
    return [name for name in names if name in training and not name.startswith("_")]


def _is_of_keras(one: type) -> bool:
    return one.__module__.split(".")[0] == "keras"


def _code_of(value: Any) -> types.CodeType | None:
    """Returns the code of a function, also of one that `tf.function` compiles; None for anything else."""
    function = getattr(value, "python_function", value)
    return inspect.unwrap(function).__code__ if inspect.isfunction(function) else None


def _names_in(code: types.CodeType) -> set[str]:
    """Returns the names in a function and in the functions inside it; `getattr` has names in strings."""
    inside = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    texts = [constant for constant in code.co_consts if isinstance(constant, str)]
    return {*code.co_names, *texts}.union(*map(_names_in, inside))


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
    loops = [*own_loops(model), *own_training(model)]
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

    return step


def _told_if_alone(method: Callable[..., Any], wrapper: Callable[[], Any]) -> Any:
    """Wraps one of the model's own loops, so that it warns if it has computed nothing on towers.

    Methods that are not Keras's warn once, and only if an optimizer has made updates: they may do anything.
    """
    function = getattr(method, "python_function", method)
    name = function.__name__

    @functools.wraps(function)
    def loop(view: Any, *args: Any, **kwargs: Any) -> Any:
        on_towers = wrapper()
        before, updates = on_towers._calls_on_towers, _updates(view)
        on_towers._own_calls += 1
        try:
            result = method(view, *args, **kwargs)
        finally:
            on_towers._own_calls -= 1
        if on_towers._calls_on_towers > before:
            return result
        if name in CALLS:
            logger.warning(
                "The model's own %s() ran on one device: it called neither super().%s(), nor train_on_batch(), "
                "train_step() or similar methods, which run on the towers.",
                *(name, name),
            )
        elif name not in FUNCTIONS and not on_towers._own_calls and not on_towers._told_own and _updates(view) != updates:
            on_towers._told_own = True
            logger.warning(
                "The model's own %s() trained on one device: it computes its steps by itself. To train on the towers, compute "
                "a step in train_step(data), where data may be any nested structure, such as (x, y, a, b), and call "
                "fit(dataset) or self.train_step(data); see docs/own_steps.md.",
                name,
            )
        return result

    return loop


def _updates(model: keras.Model) -> int | None:
    """Returns how many updates the optimizers of a model have made; None while a function is traced."""
    if not tf.executing_eagerly():
        return None
    return sum(int(value.iterations) for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer))


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
