"""Gradients, ``torch.func`` transforms and ``torch.compile`` for the integrals of :mod:`dropmax.exact.kernels`.

The kernels decide from the data how far to walk, which a compiler cannot trace. Compiled code therefore calls them as
operators ``torch.ops.dropmax_exact.*`` of known output shapes; eager code calls them directly, which is quicker.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from dropmax.errors import InvalidValue
from dropmax.exact import kernels

Tensors = tuple[Tensor, ...]


def operator(
    kernel: Callable[..., Sequence[Tensor]], schema: str, shapes: Callable[..., list[Tensor]]
) -> Callable[..., Tensors]:
    """Turn a kernel on (rows, classes) tensors into a function for any batch shape that a compiler can call too."""

    def any_batch_shape(logits: Tensor, *arguments: Any) -> list[Tensor]:
        batch, classes = logits.shape[:-1], logits.shape[-1]

        def to_rows(argument: Any) -> Any:
            if not isinstance(argument, Tensor) or len(batch) == 1:
                return argument
            return argument.reshape((-1, classes) if argument.dim() > len(batch) else (-1,))

        # Autocast would run the sums over nodes in half precision.
        autocast_off: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if torch.is_autocast_enabled(logits.device.type):
            autocast_off = torch.autocast(logits.device.type, enabled=False)
        with autocast_off:
            results = kernel(to_rows(logits), *map(to_rows, arguments))
        return [result if len(batch) == 1 else result.reshape(batch + result.shape[1:]) for result in results]

    name = f"dropmax_exact::{kernel.__name__}"
    compiled = torch.library.custom_op(name, any_batch_shape, mutates_args=(), schema=schema)
    compiled.register_fake(shapes)
    return lambda *arguments: tuple((compiled if torch.compiler.is_compiling() else any_batch_shape)(*arguments))


def _like_logits(count: int) -> Callable[..., list[Tensor]]:
    return lambda logits, *arguments: [torch.empty_like(logits) for _ in range(count)]


def _per_row_and_like_logits(count_without: int) -> Callable[..., list[Tensor]]:
    def shapes(logits: Tensor, mask_logits: Tensor, target: Tensor, with_gradients: bool) -> list[Tensor]:
        return [logits.new_empty(logits.shape[:-1]), *_like_logits(2 if with_gradients else count_without)(logits)]

    return shapes


moments = operator(
    kernels.moments,
    "(Tensor logits, Tensor retain_logits, int order) -> Tensor[]",
    lambda logits, retain_logits, order: _like_logits(order)(logits),
)
moments_backward = operator(
    kernels.moments_backward,
    "(Tensor logits, Tensor retain_logits, Tensor mean_grad, Tensor? second_grad) -> Tensor[]",
    _like_logits(2),
)
expected_nll = operator(
    kernels.expected_nll,
    "(Tensor logits, Tensor posterior_logits, Tensor target, bool with_gradients) -> Tensor[]",
    _per_row_and_like_logits(0),
)
given_target = operator(
    kernels.given_target,
    "(Tensor logits, Tensor retain_logits, Tensor target, bool with_gradients) -> Tensor[]",
    _per_row_and_like_logits(1),
)
posterior_backward = operator(
    kernels.posterior_backward,
    "(Tensor logits, Tensor retain_logits, Tensor target, Tensor log_p, Tensor posterior, Tensor grad) -> Tensor[]",
    _like_logits(2),
)


class AnyBatchFunction(Function):
    """A function of tensors with leading batch dimensions: for ``torch.vmap``, one more in front."""

    if TYPE_CHECKING:  # torch leaves it untyped

        @classmethod
        def apply(cls, *arguments: Any) -> Tensors:
            """Call the function."""
            ...

    def __init_subclass__(cls) -> None:
        """Remember the signature of ``forward``: torch would work it out again in every call, which costs 30 us."""
        if "forward" in cls.__dict__:
            cls.forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensors, tuple[int, ...]]:
        """Move the mapped dimension to the front, and give unmapped tensors one too."""
        moved = [
            argument
            if not isinstance(argument, Tensor)
            else argument.expand(info.batch_size, *argument.shape)
            if dim is None
            else argument.movedim(dim, 0)
            for argument, dim in zip(arguments, in_dims, strict=True)
        ]
        results = cls.apply(*moved)
        return results, (0,) * len(results)


class Derivative(AnyBatchFunction):
    """A first derivative, which cannot be differentiated again: saying so beats a silently wrong number."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Refuse."""
        raise InvalidValue(
            "dropmax.exact has first derivatives only, and a second one was asked for: drop create_graph=True, or "
            "differentiate the sum over masks itself (few classes) or a sampled likelihood"
        )


class Moments(AnyBatchFunction):
    """The mean and, for order 2, the second moment of p(y=k | x, z) over z."""

    @staticmethod
    def forward(logits: Tensor, retain_logits: Tensor, order: int) -> Tensors:
        """See :func:`kernels.moments`."""
        return moments(logits, retain_logits, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        """Save the inputs: the backward pass walks again."""
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """See :func:`kernels.moments_backward`."""
        mean_grad, second_grad = grads if len(grads) == 2 else (*grads, None)
        return *MomentsDerivative.apply(*ctx.saved_tensors, mean_grad, second_grad), None


class MomentsDerivative(Derivative):
    """The backward pass of :class:`Moments`."""

    @staticmethod
    def forward(logits: Tensor, retain_logits: Tensor, mean_grad: Tensor, second_grad: Tensor | None) -> Tensors:
        """See :func:`kernels.moments_backward`."""
        return moments_backward(logits, retain_logits, mean_grad, second_grad)


class ScalarOfTarget(AnyBatchFunction):
    """expected_nll or log_marginal: one number per row, with gradients from the same walk."""

    @staticmethod
    def forward(logits: Tensor, mask_logits: Tensor, target: Tensor, marginal: bool, with_gradients: bool) -> Tensors:
        """See :func:`kernels.expected_nll` and :func:`kernels.given_target`."""
        return (given_target if marginal else expected_nll)(logits, mask_logits, target, with_gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        """Save the inputs, which only tie a second derivative to them, and the gradients."""
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:2], *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> Any:
        """Scale the gradients."""
        if grad is None:
            return (None,) * 5
        return *ScalarDerivative.apply(grad, *ctx.saved_tensors), None, None, None


class ScalarDerivative(Derivative):
    """The backward pass of :class:`ScalarOfTarget`."""

    @staticmethod
    def forward(grad: Tensor, logits: Tensor, mask_logits: Tensor, on_logits: Tensor, on_mask: Tensor) -> Tensors:
        """Multiply the saved gradients by the incoming one."""
        return grad[..., None] * on_logits, grad[..., None] * on_mask


class Posterior(AnyBatchFunction):
    """log p(y=t | x), for the backward pass only, and p(z_k=1 | x, y=t)."""

    @staticmethod
    def forward(logits: Tensor, retain_logits: Tensor, target: Tensor) -> Tensors:
        """See :func:`kernels.given_target`."""
        return given_target(logits, retain_logits, target, False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        """Save inputs and results: the backward pass walks again."""
        ctx.mark_non_differentiable(output[0])
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> Any:
        """See :func:`kernels.posterior_backward`."""
        return *PosteriorDerivative.apply(*ctx.saved_tensors, grad), None


class PosteriorDerivative(Derivative):
    """The backward pass of :class:`Posterior`."""

    @staticmethod
    def forward(
        logits: Tensor,
        retain_logits: Tensor,
        target: Tensor,
        log_p: Tensor,
        posterior: Tensor,
        grad: Tensor,
    ) -> Tensors:
        """See :func:`kernels.posterior_backward`."""
        return posterior_backward(logits, retain_logits, target, log_p, posterior, grad)
