"""Parse the arguments that several commands take."""

import argparse
from collections.abc import Callable
from typing import Any

from keras_dp import choices

MODELS = ("small", "mlp", "resnet20", "resnet50", "transformer", "lstm", "unet")

IMPORTED = "my_module is imported, and so run, from this directory or Python's path"


def argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns a type for argparse that shows the message of a ValueError from `parse`."""

    def checked(value: str) -> Any:
        try:
            return parse(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def positive(value: str) -> int:
    """Returns an integer of at least 1, which a command line names."""
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"must be an integer of at least 1. Received: {value!r}")
    return int(value)


def tower_counts(value: str) -> list[int]:
    """Returns the numbers of towers that a command line lists, in increasing order."""
    return sorted({positive(towers) for towers in value.split(",")})


def model_name(value: str) -> str:
    """Returns the name of a model if `keras_dp.cli.models.workload` may know it."""
    if value not in MODELS and ":" not in value:
        question = choices.question(value, list(MODELS))
        raise ValueError(f"A model is one of {', '.join(MODELS)}, or my_module:build_function.{question} Received: {value!r}")
    return value if value in MODELS else function_name(value)


def function_name(value: str) -> str:
    """Returns the name of a function in a module, which a command line names."""
    module, _, function = value.partition(":")
    if not (all(module.split(".")) and function):
        raise ValueError(f"must be my_module:function. Received: {value!r}")
    return value


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the model, the numbers of towers, and the rows of their batches."""
    parser.add_argument(
        "--model",
        type=argument(model_name),
        default="mlp",
        help=f"{', '.join(MODELS)}, or my_module:build_function, which returns a built keras.Model; {IMPORTED}. A model that "
        "is not compiled is trained with SGD and the mean squared error (default: %(default)s)",
    )
    parser.add_argument(
        "--towers",
        type=argument(tower_counts),
        default=[1, 2, 4, 8],
        metavar="N,N,...",
        help="numbers of towers, each on a device of its own (default: 1,2,4,8)",
    )
    parser.add_argument("--batch", type=argument(positive), help="rows in a batch (default: the model's own)")
    parser.add_argument(
        "--scaling",
        choices=("strong", "weak"),
        default="strong",
        help="strong: --batch rows for all towers together; weak: --batch rows for each tower (default: %(default)s)",
    )
