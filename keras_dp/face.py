"""Face: an object that shows the public names of another one as its own."""

from typing import Any, ClassVar

from keras_dp import keras_seams


class Face(keras_seams.SavedAs):
    """Every public name is that of the object inside, read, set and deleted, but for those that subclasses of Face define.

    So whatever Keras's classes have, or will have, and whatever a user's class adds, is where the user put it.

    Attributes:
        _inside: the name of the attribute that holds the object inside.
        _own: further public names that are this object's own.
    """

    _inside: ClassVar[str]
    _own: ClassVar[frozenset[str]] = frozenset()
    _own_names: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        defined = (vars(base) for base in cls.__mro__ if issubclass(base, Face))
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

    def _shown(self) -> Any:
        """The object inside; None before there is one."""
        return vars(self).get(type(self)._inside)

    def _shown_for(self, name: str) -> Any:
        """The object inside, if the name is one of its; else None."""
        return None if name.startswith("_") or name in type(self)._own_names else self._shown()
