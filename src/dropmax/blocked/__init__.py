"""The DropMax objective without the logits: block after block of classes, in memory of size batch x block.

A batch of 256 and 100,000 classes make 25 million logits, three times; autograd keeps them and as many gradients. Here
the classes are walked in blocks. The forward pass computes the logits of a block, adds what they contribute to each
term of each row (a running log-sum-exp for the likelihood, plain sums for the others) and forgets them. The backward
pass walks the same blocks again, with the same noise (:mod:`dropmax.noise`), and writes the gradients of the block's
weights where they belong. Computing the logits twice costs a third more matrix products; where they are small enough
(:data:`KEPT_BYTES`) they are kept instead.

``terms.py`` says what goes in and what comes out, ``walk.py`` has the two walks, ``arithmetic.py`` the element-wise
work on a block (compiled into one pass over it where the caller compiles), ``autograd.py`` makes a function of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dropmax.blocked.autograd import Blocked, plain_terms
from dropmax.blocked.terms import KEPT_BYTES, RowTerms, Settings, choose_block
from dropmax.blocked.walk import compile_blocks, product_dtype

__all__ = ["KEPT_BYTES", "RowTerms", "Settings", "blocked_terms", "choose_block", "compile_blocks", "plain_terms"]


def blocked_terms(
    features: Tensor,
    maps: Sequence[Tensor],
    target: Tensor,
    noise: Tensor,
    settings: Settings,
    class_weight: Tensor | None = None,
) -> RowTerms:
    """Return the terms of the objective for features ``(N, d)``, as :func:`plain_terms` does from whole logits.

    Args:
        features: h.
        maps: weights and biases of class logits, retain logits and correction: W_o, b_o, W_a, b_a, W_r, b_r.
        target: ``(N,)`` class indices.
        noise: a seed (:func:`dropmax.noise.draw_seed`), or the uniform numbers themselves, ``(N, K)`` or ``(S, N, K)``.
        settings: see :class:`Settings`.
        class_weight: ``(K,)`` weights of the classes in ``smooth``.

    >>> h, target, noise = torch.randn(4, 8), torch.tensor([0, 9, 5, 4]), torch.rand(4, 10)
    >>> maps = [x for _ in range(3) for x in (torch.randn(10, 8), torch.randn(10))]
    >>> found = blocked_terms(h, maps, target, noise, Settings(block=3))
    >>> all(torch.allclose(x, y, rtol=1e-4) for x, y in zip(found, plain_terms(h, maps, target, noise, Settings(3))))
    True
    """
    dtype = product_dtype(features, maps)
    with torch.autocast(features.device.type, enabled=False):
        terms = Blocked.apply(features, *maps, target, noise, class_weight, settings, dtype)  # type: ignore[no-untyped-call]
    return RowTerms(*terms)
