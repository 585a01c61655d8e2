"""Tensors at an odd storage offset, as memory-mapped weights are: kernels then take their unaligned paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_FACTORIES = {
    *(torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.tensor),
    *(torch.linspace, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like),
    *(torch.randn_like, torch.empty_like),
}


def misalign(x: Tensor) -> Tensor:
    """Return the same numbers one element further into their memory."""
    moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    return moved.copy_(x.detach()).requires_grad_(x.requires_grad)


class Misaligned(TorchFunctionMode):
    """While active, every factory function of torch returns contiguous CPU floats at storage offset 1."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in _FACTORIES or not isinstance(made, Tensor) or type(made) is not Tensor:
            return made
        compiling = torch.compiler.is_compiling()  # a compiler cannot trace the next question
        if not compiling and torch._C._functorch.is_functorch_wrapped_tensor(made):  # vmap's, no memory of its own
            return made
        plain = made.device.type == "cpu" and made.is_floating_point() and made.is_contiguous() and made.numel() > 1
        return misalign(made) if plain and made.layout == torch.strided and made.is_leaf else made
