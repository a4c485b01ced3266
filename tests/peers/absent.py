"""Modules that a peer imports and that its parts under test do not call: rollout engines, which need a GPU."""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any


class _Anything(type):
    """A class of which every attribute is there, since some are read when a module is imported."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make(name)


def make(name: str) -> Any:
    """A class by this name; as a decorator it returns what it is given."""

    def new(cls: Any, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else object.__new__(cls)

    return _Anything(name, (), {"__new__": new})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, make(name))
        return getattr(self, name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes an empty module for every name below the given packages."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__path__ = []


def stand_in(*packages: str) -> None:
    """Let these packages be imported though they are absent."""
    sys.meta_path.append(Finder(*packages))
