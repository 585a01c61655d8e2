"""The moments of :mod:`dropmax.exact` in plain operations, as one graph that ``torch.export`` and ONNX can carry.

The kernels walk over the nodes in Python and stop where F has died out, which no graph can hold. Here the same walk is
a ``while_loop`` inside the graph, in float64 and without a workspace: it too stops where nothing is left, so it is as
accurate as the kernels for any logits (docs/export.md has the measured difference).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from dropmax.errors import RunError
from dropmax.exact.quadrature import WIDEST_GAP, WIDEST_SPREAD, rule_for

__all__ = ["moments"]

NODES = 16  # in a round of the loop: five units of log s, after which F has often died out
LARGEST_LOG_X = 6.5  # x exp(-x) is below 1e-280 there, and exp(-x) is not yet 0

_RULE = rule_for(torch.float64)  # made once, here: torch.compile before 2.11 cannot trace the numpy inside


def moments(logits: Tensor, retain_logits: Tensor, order: int) -> tuple[Tensor, ...]:
    """Return the mean of p(y=k | x, z) over z and, for order 2, its second moment too, each (..., K) in float64.

    Equals, to about 1e-12, :func:`dropmax.exact.kernels.moments` of the same logits in float64.
    """
    o, a = logits.double(), retain_logits.double()
    softmax = o.softmax(-1)
    none = logsigmoid(-a).sum(-1, keepdim=True).exp()  # P(z = 0)
    log_w, spread = _cut_gaps(o)
    retain, drop = a.sigmoid(), (-a).sigmoid()
    rule = _RULE

    def visit(position: Tensor, weight: Tensor | float) -> tuple[Tensor, ...]:
        """Return what the nodes log s = position (n,) add to the moments, and F - P(z = 0) at the last of them."""
        x = (log_w.unsqueeze(-2) + position.unsqueeze(-1)).clamp_max(LARGEST_LOG_X).exp()
        kept = retain.unsqueeze(-2) * (-x).exp()
        factor = drop.unsqueeze(-2) + kept
        product = factor.log().sum(-1).exp()
        term = (product * weight).unsqueeze(-1) * kept * x / factor
        sums = [term.sum(-2)]
        if order == 2:
            sums.append((term * x).sum(-2))
        return (*sums, product[..., -1:] - none)

    left = torch.tensor(rule.left, dtype=torch.float64, device=o.device)
    *sums, remaining = visit(left[:, 0], left[:, 1])
    steps = rule.step * torch.arange(NODES, dtype=torch.float64, device=o.device)

    def goes_on(position: Tensor, remaining: Tensor, *sums: Tensor) -> Tensor:
        # The integrals further right add up to exactly F(s) - P(z = 0) over the classes. A row with NaN compares
        # as done, so that it does not decide for the others.
        return ((remaining > rule.tolerance) & (position < spread + rule.reach)).any()

    def walk(position: Tensor, _: Tensor, *sums: Tensor) -> tuple[Tensor, ...]:
        *more, remaining = visit(position + steps, rule.step)
        return position + rule.step * NODES, remaining, *(old + new for old, new in zip(sums, more, strict=True))

    start = torch.full((), rule.start, dtype=torch.float64, device=o.device)
    _, _, *sums = _while_loop()(goes_on, walk, (start, remaining, *sums))
    return tuple(total + none * softmax**power for power, total in enumerate(sums, start=1))


def _cut_gaps(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return log w with gaps between neighbours of at most WIDEST_GAP, and how far the last class lies below 0."""
    logits = (logits - logits.amax(-1, keepdim=True)).clamp_min(-WIDEST_SPREAD)
    log_w = logits - logits.logsumexp(-1, keepdim=True)
    ordered, order = log_w.sort(-1, descending=True)
    excess = (ordered[..., :-1] - ordered[..., 1:] - WIDEST_GAP).clamp_min(0)
    lift = pad(excess.cumsum(-1), (1, 0))
    log_w = log_w + torch.zeros_like(log_w).scatter(-1, order, lift)
    return log_w, -log_w.amin(-1, keepdim=True)


def _while_loop() -> Any:
    try:
        from torch._higher_order_ops.while_loop import while_loop  # no public name yet
    except ImportError as error:
        raise RunError(
            f"exporting exact prediction needs a torch with while_loop, which {torch.__version__} does not have: "
            "upgrade torch"
        ) from error
    return while_loop
