"""Import paths of version 0.1 that have moved: the old names still give the same modules."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_WORKBENCH = "data networks recipes training evaluation export hub model_card files provenance doctor terminal"
_LAB = "experiments figures report explorer diagnostics results"

#: Old path -> new path; what lies below a package moves with it.
MOVED = {
    **{f"dropmax.{name}": f"dropmax.workbench.{name}" for name in _WORKBENCH.split()},
    **{f"dropmax.{name}": f"dropmax.lab.{name}" for name in _LAB.split()},
    "dropmax.prediction": "dropmax.topk",
    "dropmax.blocked": "dropmax.walk",
}


class _Alias(Loader):
    """Loads a module under its new name and leaves its spec as it was."""

    def __init__(self, target: str) -> None:
        self.target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.target)
        self.spec = module.__spec__  # importlib is about to overwrite it
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parts = fullname.split(".")
        moved = MOVED.get(".".join(parts[:2]))
        return ModuleSpec(fullname, _Alias(".".join([moved, *parts[2:]]))) if moved else None


def install() -> None:
    """Make the old paths importable, once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # before the one that would load a package's files a second time
