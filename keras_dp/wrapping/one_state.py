"""Make an object that has the state of another one, with other classes in front of and behind its class."""

import copy
from typing import Any

# The only attribute of such an object that is not the other one's. It holds `inside`, the other object, and `wrap`, a function.
OWN = "_keras_dp"
_USERS_CLASS = "_keras_dp_users_class"


class Front:
    """Stands in front of the class of the object inside, for Keras and Python to make the same of the two.

    `__class__` is the user's class, by which Keras saves and clones. Pickles hold the object inside. A copy is wrapped again.
    """

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an object of the user's class, as `type(self)(...)` in a method of the user's does."""
        return users_class(cls)(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keeps the user's class from counting or registering the class of a wrapper."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The user's class."""
        return users_class(type(self))

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an object of the user's class."""
        return users_class(cls).from_config(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return own_of(self).inside.__reduce_ex__(protocol)

    def __copy__(self) -> Any:
        own = own_of(self)
        return own.wrap(copy.copy(own.inside))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        own = own_of(self)
        return own.wrap(copy.deepcopy(own.inside, memo))


class Behind:
    """Stands behind the class of the object inside: names of its subclasses give way to the user's."""

    @classmethod
    def from_config(cls, config: Any, custom_objects: Any = None) -> Any:
        """Refuses to rebuild a wrapper from a configuration, which is that of the object inside.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"The configuration of a {cls.__name__} is the configuration of the object inside. Rebuild that object with "
            f"from_config() of its own class, and wrap it: keras_dp.{cls.__name__}(...). Received: config={config}"
        )


class OwnName:
    """Is a read-only property that gives way to an attribute of the same name that a program sets on an instance.

    Args:
        read: returns the value for an instance.
    """

    def __init__(self, read: Any):
        self.__doc__ = read.__doc__
        self._read = read

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Returns the value."""
        return self if instance is None else self._read(instance)


def own_of(made: Any) -> Any:
    """Returns what an object made by `with_state_of` has beside the state of the object inside."""
    return getattr(made, OWN)


def is_made(value: Any) -> bool:
    """Returns whether an object was made by `with_state_of`."""
    return hasattr(type(value), OWN)


def users_class(kind: type) -> Any:
    """Returns the class of the object inside, from the class of an object made by `with_state_of`."""
    return getattr(kind, _USERS_CLASS, kind)


def with_state_of(inside: Any, front: type, behind: type, **names: Any) -> Any:
    """Returns an object that shares its `__dict__` with another one, so that every attribute, private or not, is one.

    Its class derives from `front`, the class of `inside`, and `behind`, in this order. Names of `front` are in the place of the
    user's. Names of `behind` give way to the user's, whose `super()` leads to them, and are in the place of Keras's.

    The class is made without the user's `__init_subclass__` and metaclass, which may count or register classes.

    Args:
        inside: the object.
        front: a subclass of `Front` without instance attributes.
        behind: a subclass of `Behind` and of a class of `inside`, such as `keras.Model`. Its `__init__` initializes the object.
        **names: further attributes of the class.
    """
    own_class = type(inside)
    names |= {"__slots__": (OWN,), _USERS_CLASS: own_class}
    names |= {name: getattr(behind, name) for name in ("__init__", "__doc__", "__module__", "__qualname__")}
    names |= {name: _of_inside(name) for name in _kept_elsewhere(own_class, behind)}
    bases = (front, behind) if issubclass(behind, own_class) else (front, own_class, behind)
    made = object.__new__(type.__new__(type(own_class), behind.__name__, bases, names))
    object.__setattr__(made, "__dict__", vars(inside))
    return made


def _kept_elsewhere(own_class: type, behind: type) -> list[str]:
    """Lists the attributes of a class that no `__dict__` holds: those in `__slots__`, and those that its descriptors keep."""
    own = (vars(base) for base in own_class.__mro__ if base not in behind.__mro__)
    members = (item for namespace in own for item in namespace.items())
    return [
        name
        for name, member in members
        if hasattr(type(member), "__set__") and not isinstance(member, property) and not name.startswith("__")
    ]


def _of_inside(name: str) -> property:
    """Returns an attribute that is read, set and deleted on the object inside."""
    return property(
        lambda made: getattr(own_of(made).inside, name),
        lambda made, value: setattr(own_of(made).inside, name, value),
        lambda made: delattr(own_of(made).inside, name),
    )
