"""dropmax: a softmax that learns, for each input, which rival classes deserve attention.

Names are imported when first used, so that the command line can answer ``--help`` without waiting for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dropmax import _moved

if TYPE_CHECKING:
    from dropmax import calibration, exact, functional
    from dropmax.classifier import Classifier, replace_head
    from dropmax.errors import DropMaxError
    from dropmax.heads import (
        HEADS,
        PAPER_OBJECTIVE,
        DeterministicAttention,
        DeterministicDropMax,
        DropMax,
        DropMaxQP,
        Head,
        Loss,
        RandomDropMax,
        SampledSoftmax,
        Softmax,
        Sparsemax,
        make_head,
        register_head,
    )
    from dropmax.packed import DropMaxLoss, PackedHead, features_of

__version__ = "0.1.0"

__all__ = [
    "HEADS",
    "PAPER_OBJECTIVE",
    "Classifier",
    "DeterministicAttention",
    "DeterministicDropMax",
    "DropMax",
    "DropMaxError",
    "DropMaxLoss",
    "DropMaxQP",
    "Head",
    "Loss",
    "PackedHead",
    "RandomDropMax",
    "SampledSoftmax",
    "Softmax",
    "Sparsemax",
    "calibration",
    "exact",
    "features_of",
    "functional",
    "make_head",
    "register_head",
    "replace_head",
]

_moved.install()

_MODULES = {
    "Classifier": "classifier",
    "replace_head": "classifier",
    "DropMaxError": "errors",
    "DropMaxLoss": "packed",
    "PackedHead": "packed",
    "features_of": "packed",
}


def __getattr__(name: str) -> Any:
    if name in ("calibration", "exact", "functional") or f"dropmax.{name}" in _moved.MOVED:
        return import_module(f"dropmax.{name}")
    if name in __all__:
        return getattr(import_module(f"dropmax.{_MODULES.get(name, 'heads')}"), name)
    raise AttributeError(f"module 'dropmax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
