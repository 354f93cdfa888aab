"""List the values of arguments that take only a few, and refuse all other values."""

import dataclasses
import difflib
import numbers
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

BatchNorm: TypeAlias = Literal["sync", "local", "first"]
GradientType: TypeAlias = Literal["bfloat16", "float16", None]
TowerCommunication: TypeAlias = Literal["copies", "nccl", None]
Step: TypeAlias = Literal["train", "test", "predict"]
Rows: TypeAlias = Literal["all", "shard"]
Reduction: TypeAlias = Literal["sum", "mean"]
Accumulation: TypeAlias = Literal["batches", "rows"]
Communication: TypeAlias = Literal["ring", "nccl"]


@dataclasses.dataclass(frozen=True)
class Options:
    """Holds how a model trains on towers: the arguments of `DataParallelModel`, which explains them, after the model.

    Raises:
        ValueError: if an argument that takes only a few values, or positive integers, has another one.
    """

    devices: int | Sequence[str] | None = None
    parameter_device: str | None = None
    batch_norm: BatchNorm = "sync"
    gradient_dtype: GradientType = None
    whole: Sequence[str] = ()
    communication: TowerCommunication = None
    verify: bool | None = None
    slices_per_device: int = 1
    rows: Sequence[int] | None = None

    def __post_init__(self) -> None:
        refuse_unknown("batch_norm", self.batch_norm, BatchNorm)
        refuse_unknown("gradient_dtype", self.gradient_dtype, GradientType)
        refuse_unknown("communication", self.communication, TowerCommunication)
        count = self.slices_per_device
        if not _is_positive_integer(count):
            raise ValueError(
                "`slices_per_device` must be a positive integer: how many slices each device computes one after the other. "
                "Give 1 for all its rows at once; keras_dp.find_slices() finds how many fit in its memory. "
                f"Received: slices_per_device={count!r}"
            )
        if self.rows is not None and not (isinstance(self.rows, list | tuple) and all(map(_is_positive_integer, self.rows))):
            raise ValueError(
                "`rows` must be None, or a list of positive integers, a share of the rows for each device. Only their "
                f"proportions count: give [3, 2] in place of [1.5, 1]. Received: rows={self.rows!r}"
            )
        if self.rows is not None:
            # The caller's list may change.
            object.__setattr__(self, "rows", tuple(self.rows))


def _is_positive_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def values_of(choice: Any) -> list[Any]:
    """Returns the values of one of these types."""
    return list(get_args(choice))


def refuse_unknown(name: str, value: Any, choice: Any) -> None:
    """Raises a ValueError if an argument is not among the values of a type."""
    values = values_of(choice)
    if value not in values:
        known = ", ".join(map(repr, values))
        raise ValueError(f"`{name}` must be one of {known}.{question(value, values)} Received: {name}={value!r}")


def question(value: Any, known: list[Any]) -> str:
    """Returns a question that suggests the known name most like a wrong one; empty if no name is like it.

    >>> question("shard", ["sharded"]), question("other", ["sharded"])
    (" Did you mean 'sharded'?", '')
    """
    names = [name for name in known if isinstance(name, str)]
    like = difflib.get_close_matches(str(value).lower(), names, n=1)
    return f" Did you mean {like[0]!r}?" if like else ""
