"""A proxy shows the public names of another object as its own."""

import pytest

from keras_dp.wrapping.proxy import Proxy


class Inside:
    kind = "inside"

    def __init__(self):
        self.value = 1

    def double(self):
        return 2 * self.value


class Shell(Proxy):
    _inside = "core"
    _own = frozenset({"kept"})

    def __init__(self, core):
        self.core = core

    def double(self):
        return "the shell's own"


def test_names_are_read_set_and_deleted_inside():
    core = Inside()
    shell = Shell(core)
    shell.value = 5
    shell.new = 6
    assert (core.value, core.new, shell.kind) == (5, 6, "inside")
    del shell.new
    assert not hasattr(core, "new")
    assert {"value", "kind"} <= set(dir(shell))
    with pytest.raises(AttributeError, match="'Inside' object has no attribute 'nothing'"):
        _ = shell.nothing


class Extended(Shell):
    """Extends the proxy as a user's subclass."""

    def triple(self):
        return "the subclass's"


def test_what_the_classes_define_or_list_is_the_shells():
    core = Inside()
    shell = Extended(core)
    assert shell.triple() == "the subclass's"
    shell.kept = 7
    assert not hasattr(core, "kept")
    shell._private = 8
    assert not hasattr(core, "_private")
    assert shell.core is core
    assert shell.double() == "the shell's own"
    del shell.kept
    assert not hasattr(shell, "kept")
