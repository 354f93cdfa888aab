"""List the values of arguments that take only a few, and refuse all other values."""

import difflib
from typing import Any, Literal, TypeAlias, get_args

BatchNorm: TypeAlias = Literal["sync", "local", "first"]
GradientType: TypeAlias = Literal["bfloat16", "float16", None]
PackCopies: TypeAlias = Literal[True, False, None]
Step: TypeAlias = Literal["train", "test", "predict"]
Rows: TypeAlias = Literal["all", "shard"]
Reduction: TypeAlias = Literal["sum", "mean"]
Accumulation: TypeAlias = Literal["batches", "rows"]
Communication: TypeAlias = Literal["ring", "nccl"]


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
