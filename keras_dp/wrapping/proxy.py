"""Forward the public names of a proxy to the object inside."""

import copy
import functools
from collections.abc import Callable
from typing import Any, ClassVar

from keras_dp.keras_internals import saving


class Proxy(saving.SavedAs):
    """Forwards the public names to the object inside, except names that subclasses of Proxy define.

    A forwarded name is read, set and deleted on the object inside. So the attributes of Keras's classes, in any version, and
    those that a user's class adds, stay where the user put them.

    Saving and pickling save the object inside, which loads without keras_dp. Copies and clones are proxies again.

    Attributes:
        _inside: the name of the attribute that holds the object inside.
        _own: further public names that are not forwarded.
    """

    _inside: ClassVar[str]
    _own: ClassVar[frozenset[str]] = frozenset()
    _own_names: ClassVar[frozenset[str]] = frozenset()
    _around: Callable[[Any], Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        defined = (vars(base) for base in cls.__mro__ if issubclass(base, Proxy))
        cls._own_names = cls._own.union({cls._inside}, *defined)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattribute__(name)
        shown = self._shown_for(name)
        return super().__getattribute__(name) if shown is None else getattr(shown, name)

    def __setattr__(self, name: str, value: Any) -> None:
        shown = self._shown_for(name)
        if shown is None:
            super().__setattr__(name, value)
        else:
            setattr(shown, name, value)

    def __delattr__(self, name: str) -> None:
        shown = self._shown_for(name)
        if shown is None:
            super().__delattr__(name)
        else:
            delattr(shown, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._shown())})

    def __reduce__(self) -> Any:
        return self._shown().__reduce__()

    def __copy__(self) -> Any:
        return self._alike(copy.copy(self._shown()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._alike(copy.deepcopy(self._shown(), memo))

    @classmethod
    def from_config(cls, config: Any, custom_objects: Any = None) -> Any:
        """Refuses to rebuild a proxy from its class; an object's own class can, see `_remember`.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"The configuration of a {cls.__name__} is the configuration of the object inside. Rebuild that object with "
            f"from_config() of its own class, and wrap it: keras_dp.{cls.__name__}({cls._inside}). Received: config={config}"
        )

    def _remember(self, **arguments: Any) -> None:
        """Stores the arguments of this object, except the object inside, for copies and clones.

        Keras clones models from their class and their configuration alone, and the configuration belongs to the object inside.
        So this object gets its own class, whose `from_config` rebuilds the object inside and wraps it with these arguments.
        """
        own_class: Any = type(self)
        self._around = functools.partial(own_class, **arguments)

        def from_config(cls: type, config: Any, custom_objects: Any = None) -> Any:
            return self._alike(type(self._shown()).from_config(config))

        names = {name: getattr(own_class, name) for name in ("__doc__", "__module__", "__qualname__")}
        class_of_its_own = type(own_class.__name__, (own_class,), {**names, "from_config": classmethod(from_config)})
        # Does `self.__class__ = ...`, even if a property `__class__` returns another class.
        vars(object)["__class__"].__set__(self, class_of_its_own)

    def _alike(self, inside: Any) -> Any:
        """Returns a proxy of another object, with the settings of this one."""
        return self._around(inside)

    def _shown(self) -> Any:
        """Returns the object inside; None before there is one."""
        return vars(self).get(type(self)._inside)

    def _shown_for(self, name: str) -> Any:
        """Returns the object inside if the name is forwarded to it; None otherwise."""
        return None if name.startswith("_") or name in type(self)._own_names else self._shown()
