"""Make an object that has the state of another one, with other classes in front of and behind its class."""

import copy
import functools
import inspect
from collections.abc import Callable
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

    @property
    def __class__(self) -> Any:
        """The user's class."""
        return users_class(type(self))

    @__class__.setter
    def __class__(self, own_class: type) -> None:
        raise TypeError(
            "The class of a wrapper is made of that of the object inside. Set the class of that object, and wrap it again. "
            f"Received: {own_class}"
        )

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


def with_state_of(
    inside: Any, front: type, behind: type, names_of: Callable[[type], dict[str, Any]] = lambda own_class: {}
) -> Any:
    """Returns an object that shares its `__dict__` with another one, so that every attribute, private or not, is one.

    Its class derives from `front`, the class of `inside`, and `behind`, in this order. Names of `front` are in the place of the
    user's. Names of `behind` give way to the user's, whose `super()` leads to them, and are in the place of Keras's.

    Args:
        inside: the object.
        front: a subclass of `Front` without instance attributes.
        behind: a subclass of `Behind` and of a class of `inside`, such as `keras.Model`. Its `__init__` initializes the object.
        names_of: returns further attributes for the class, from the class of `inside`.
    """
    made: Any = object.__new__(_made_class(type(inside), front, behind, names_of))
    object.__setattr__(made, "__dict__", vars(inside))
    return made


def _made_class(own_class: type, front: type, behind: type, names_of: Callable[[type], dict[str, Any]]) -> type:
    """Makes the class without the user's `__init_subclass__` and metaclass, which may count or register classes."""
    names = {name: getattr(behind, name) for name in ("__init__", "__doc__", "__module__", "__qualname__")}
    names |= {"__slots__": (OWN,), _USERS_CLASS: own_class}
    kept: Any = object
    if (own_class.__eq__, own_class.__hash__) == (kept.__eq__, kept.__hash__):
        # Tables of objects, as those of `functools.lru_cache`, have one entry for the two.
        names |= {"__eq__": _is_the_same, "__hash__": lambda made: hash(own_of(made).inside)}
    if hasattr(own_class, "__del__"):
        # The object inside has one, and lives as long.
        names["__del__"] = lambda made: None
    for name, member in _own_members(own_class, behind):
        if isinstance(member, classmethod):
            names[name] = property(functools.partial(_bound, member, own_class))
        elif hasattr(type(member), "__set__") and not isinstance(member, property):
            # Neither attributes in `__slots__` nor those that descriptors keep are in the `__dict__`.
            names[name] = _of_inside(name)
    bases = (front, behind) if issubclass(behind, own_class) else (front, own_class, behind)
    kind = type("OfUsersClass", (_OfUsersClass, type(own_class)), {})
    return type.__new__(kind, behind.__name__, bases, names | names_of(own_class))


class _OfUsersClass(type):
    """Is the metaclass of these classes: for `isinstance`, and for attributes that are set, they are the user's class."""

    def __setattr__(cls, name: str, value: Any) -> None:
        setattr(users_class(cls), name, value)

    def __delattr__(cls, name: str) -> None:
        delattr(users_class(cls), name)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, users_class(cls))

    def __subclasscheck__(cls, subclass: type) -> bool:
        # An abstract class asks its subclasses, this one among them.
        return type.__subclasscheck__(users_class(cls), subclass)


def _own_members(own_class: type, behind: type) -> list[tuple[str, Any]]:
    """Lists the members of the user's classes, without special names, by the names with which they are found."""
    own = [base for base in own_class.__mro__ if base not in behind.__mro__]
    names = dict.fromkeys(name for base in own for name in vars(base) if not name.startswith("__"))
    found = ((name, inspect.getattr_static(own_class, name)) for name in names)
    return [(name, member) for name, member in found if any(vars(base).get(name) is member for base in own)]


def _bound(member: Any, own_class: type, made: Any) -> Any:
    return member.__get__(None, own_class)


def _is_the_same(made: Any, other: Any) -> bool:
    return made is other or own_of(made).inside is other


def _of_inside(name: str) -> property:
    """Returns an attribute that is read, set and deleted on the object inside."""
    return property(
        lambda made: getattr(own_of(made).inside, name),
        lambda made, value: setattr(own_of(made).inside, name, value),
        lambda made: delattr(own_of(made).inside, name),
    )
