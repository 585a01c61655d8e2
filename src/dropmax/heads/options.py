"""The options of heads: those all share, which ones a head takes, and what to say about one it does not."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from dropmax.errors import unknown

if TYPE_CHECKING:
    from dropmax.heads.base import Head


class SharedOptions(TypedDict, total=False):
    """The options every head takes, see :class:`Head`."""

    label_smoothing: float
    class_weight: Tensor | Sequence[float] | None
    ignore_index: int
    device: torch.device | str | None
    dtype: torch.dtype | None


def option_defaults(head: type[Head]) -> dict[str, Any]:
    """Return the options a head's constructor takes beyond its sizes, device and dtype, with their defaults."""
    own = {"in_features", "num_classes", "device", "dtype", "ranks"}
    options: dict[str, Any] = {}
    for cls in head.__mro__:
        if cls is torch.nn.Module:  # from here on, nothing of ours
            break
        for p in inspect.signature(cls).parameters.values():
            if p.name not in own and p.kind is not p.VAR_KEYWORD:
                options.setdefault(p.name, p.default)
    return options


def option_names(head: type[Head]) -> list[str]:
    """Return the names of the options of a head."""
    return list(option_defaults(head))


def unknown_option(head: type[Head], option: str) -> str:
    """Return what to say about an option this head does not have."""
    return unknown(f"option of {head.name}", option, option_names(head))
