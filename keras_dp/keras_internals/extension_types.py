"""Take a `tf.experimental.ExtensionType` apart into its tensors, and put others in their places."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

Path = tuple[str, ...]


def is_extension_type(value: Any) -> bool:
    """Returns whether a value is of an extension type, or is the type spec of one."""
    kind = value.value_type if isinstance(value, tf.TypeSpec) else type(value)
    return isinstance(kind, type) and issubclass(kind, tf.experimental.ExtensionType)


def components_of(value: Any) -> list[tuple[Path, Any]]:
    """Lists the tensors of a value of an extension type, or their specs for a spec, by the paths of their fields.

    A tensor is dense, ragged, sparse, or a value of an extension type again. Fields of other kinds, such as numbers and names,
    belong to the type.
    """
    spec = _spec_of(value)
    named = [(path, part) for name, field in vars(spec).items() for path, part in _named((name,), field)]
    paths = [path for path, part in named if isinstance(part, tf.TypeSpec)]
    components = spec._component_specs if value is spec else spec._to_components(value)
    return list(zip(paths, components, strict=True))


def with_components(value: Any, components: Sequence[Any]) -> Any:
    """Returns a value of an extension type like another value or spec, with other tensors; for specs of tensors, its spec."""
    made = _spec_of(value)._from_components(tuple(components))
    are_specs = bool(components) and all(isinstance(component, tf.TypeSpec) for component in components)
    return tf.type_spec_from_value(made) if are_specs else made


def _spec_of(value: Any) -> Any:
    return value if isinstance(value, tf.TypeSpec) else tf.type_spec_from_value(value)


def _named(path: Path, field: Any) -> Iterator[tuple[Path, Any]]:
    """Yields what a field holds in tuples and mappings, in TensorFlow's order."""
    if isinstance(field, Mapping):
        for key in sorted(field):
            yield from _named((*path, str(key)), field[key])
    elif isinstance(field, tuple):
        for index, part in enumerate(field):
            yield from _named((*path, str(index)), part)
    else:
        yield path, field
