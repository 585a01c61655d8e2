"""What a head is: two hooks to fill in, and everything else written once around them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from dropmax.calibration import Calibration
from dropmax.checks import (
    check_choice,
    check_class_weight,
    check_count,
    check_features,
    check_finite,
    check_flag,
    check_probability,
    check_soft_target,
    check_target,
    is_exporting,
    is_traced,
    is_transformed,
    values_are_readable,
)
from dropmax.errors import InvalidType, InvalidValue
from dropmax.functional import _wide, cross_entropy
from dropmax.heads.loss import REDUCTIONS, Loss, RowLosses, expected_losses
from dropmax.heads.options import option_defaults, option_names, unknown_option
from dropmax.imports import import_name
from dropmax.linear import Partition, make_map
from dropmax.noise import draw_words, uniform
from dropmax.topk import BLOCK_NUMBERS, MODES, TopK, row_blocks, topk

__all__ = ["MODES", "Head", "Loss", "keep_target"]

_Self = TypeVar("_Self", bound="Head")

#: What a class that overrides one of these methods can no longer do, unless it says so itself.
_TAKEN_AWAY = {"packable": ("loss",), "fused": ("terms", "logits"), "soft_targets": ("terms",)}


class Head(nn.Module):
    """The last layer of a classifier: ``forward``, ``loss``, ``predict_proba`` and what the masks look like.

    Args:
        in_features: size of the feature vector h.
        num_classes: K, at least 2.
        label_smoothing: share of the label spread over the other classes; over the retained ones where there is a mask.
        class_weight: one weight per class, as ``weight`` of ``torch.nn.CrossEntropyLoss``.
        ignore_index: label of rows that do not count.
        device, dtype: of the parameters.
        ranks: for subclasses, the rank of the map of each parameter group (:class:`dropmax.linear.LowRankLinear`).

    Features may have any batch shape, ``(..., in_features)`` with targets ``(...)``.

    **A head of your own** names itself and fills in two hooks: :meth:`logits`, the outputs of its linear maps, and
    :meth:`terms`, the terms of the loss of each row, which are added up. The rest (reduction, class weights,
    ``ignore_index``, noise, packing, sharding, export) is here:

    >>> class Focal(Head):
    ...     name = "focal"
    ...
    ...     def terms(self, logits, target, noise):
    ...         nll = self.cross_entropy(logits["classifier"], target)
    ...         return {"focal": (1 - (-nll).exp()) ** 2 * nll}
    >>> head = Focal(in_features=8, num_classes=3)
    >>> head.loss(torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])).total.shape
    torch.Size([])

    Where the mean prediction is not ``softmax(logits["classifier"])``, it overrides :meth:`prediction_logits` or
    :meth:`probabilities`; where the loss is not the plain sum of its terms, :meth:`term_weights`; where it needs noise,
    :meth:`noise_shape`; where it keeps an average or a count, :meth:`observe`. The attributes below say what a head can
    do.
    """

    #: The name it is made by; a class that gives none has its own, ``"Focal"``.
    name: ClassVar[str]

    #: Which of the paper's parameter groups each linear map is: an attribute of the head, made by the constructor.
    maps: ClassVar[dict[str, str]] = {"psi": "classifier"}

    #: The maps whose outputs :meth:`prediction_logits` and :meth:`probabilities` need.
    predicts_with: ClassVar[tuple[str, ...]] = ("classifier",)

    #: Terms to which :meth:`terms` has applied ``class_weight`` already; :meth:`loss` multiplies the others.
    class_weighted: ClassVar[frozenset[str]] = frozenset()

    #: The mean prediction is the softmax of :meth:`prediction_logits`, and each of these logits depends on one class:
    #: then :func:`dropmax.topk.topk` computes a block of classes at a time.
    separable: ClassVar[bool] = False

    #: The loss is computed from :meth:`logits` alone, so that :class:`dropmax.PackedHead` can do it. A class that
    #: overrides :meth:`loss` says so itself if that is still true.
    packable: ClassVar[bool] = True

    #: There is a faster form of :meth:`terms` and :meth:`logits` that computes the same. A class that overrides one of
    #: them says so itself if that is still true.
    fused: ClassVar[bool] = False

    #: :meth:`observe` is called. A class that overrides it need not say so.
    stateful: ClassVar[bool] = False

    #: :meth:`prediction_logits` are not the logits of :attr:`classifier` themselves. A class that overrides it need not
    #: say so.
    transforms: ClassVar[bool] = False

    #: :meth:`terms` takes soft labels ``(N, K)`` too; otherwise it is called once for each label of a row. A class that
    #: overrides :meth:`terms` says so itself if that is still true.
    soft_targets: ClassVar[bool] = False

    #: The loss stops a gradient on purpose, so that its gradient is not that of its value by finite differences.
    stops_gradient: ClassVar[bool] = False

    #: Masks are drawn when predicting: the modes "mc" and "exact" differ from "mean".
    masked: bool = False

    #: Who has which classes, where ranks share them (:func:`dropmax.sharding.shard`).
    partition: Partition | None = None

    #: Temperatures and the mode that is the answer, where they were fitted on held-out rows.
    calibration: Calibration | None = None

    classifier: nn.Linear
    class_weight: Tensor | None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls)
        if "name" not in own:
            cls.name = cls.__name__
        for attribute, methods in _TAKEN_AWAY.items():
            if attribute not in own and not own.keys().isdisjoint(methods):
                setattr(cls, attribute, False)
        cls.stateful = cls.stateful or "observe" in own
        cls.transforms = cls.transforms or "prediction_logits" in own

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        label_smoothing: float = 0.0,
        class_weight: Tensor | Sequence[float] | None = None,
        ignore_index: int = -100,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        ranks: Mapping[str, int | None] | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        for option in unknown:
            raise InvalidType(unknown_option(type(self), option))
        check_count("in_features", in_features)
        check_count("num_classes", num_classes, least=2)
        if not isinstance(ignore_index, int):
            raise InvalidType(f"ignore_index must be a whole number, got {ignore_index!r}")
        check_probability("label_smoothing", label_smoothing, zero=True)
        self.in_features = in_features
        self.num_classes = num_classes
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index
        for group, attribute in self.maps.items():
            rank = (ranks or {}).get(group)
            setattr(self, attribute, make_map(in_features, num_classes, rank, device=device, dtype=dtype))
        self.register_buffer("class_weight", check_class_weight(class_weight, num_classes, device), persistent=False)

    # --- the two hooks -------------------------------------------------------------------------------------------

    def logits(self, rows: Tensor) -> dict[str, Tensor]:
        """Return what the loss needs of features ``(..., d)``: tensors ``(..., K)`` by name, one per linear map.

        This is the only place where the loss may use parameters.
        """
        return {name: getattr(self, name)(rows) for name in self.maps.values()}

    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        """Return the terms of the loss of each row, ``(N,)`` by name, with a gradient.

        Args:
            logits: what :meth:`logits` returned, each ``(N, K)``.
            target: ``(N,)`` class indices, all of them valid.
            noise: uniform numbers in [0, 1) of the shape that :meth:`noise_shape` asks for; None if it asks for none.
        """
        raise NotImplementedError(f"{type(self).__name__} must define terms(self, logits, target, noise)")

    # --- what a head may also say --------------------------------------------------------------------------------

    def term_weights(self) -> dict[str, float]:
        """Return the weight of each term in the total; terms that are not in it have weight 1."""
        return {}

    def noise_shape(self, num_rows: int) -> tuple[int, ...] | None:
        """Return the shape of the uniform noise :meth:`loss` takes for this many rows; None where it draws none.

        Its last two dimensions are rows and classes.
        """
        return None

    def prediction_logits(self, logits: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of the mean prediction from those of the maps in :attr:`predicts_with`."""
        return logits["classifier"]

    def probabilities(
        self,
        logits: Mapping[str, Tensor],
        mode: str = "mean",
        samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return what :meth:`predict_proba` returns, from the logits of the maps in :attr:`predicts_with`."""
        return self.prediction_logits({name: _wide(x) for name, x in logits.items()}).softmax(-1)

    def observe(self, logits: Mapping[str, Tensor], target: Tensor, counts: Tensor) -> None:
        """Update buffers of the head from a batch: called in training mode, after the loss and without a gradient.

        Args:
            logits: what :meth:`logits` returned, each ``(N, K)``.
            target: ``(N,)`` class indices.
            counts: ``(N,)``, False for the rows of ``ignore_index``.
        """

    # --- what a user calls ---------------------------------------------------------------------------------------

    def forward(self, features: Tensor) -> Tensor:
        """Return ``(..., K)`` logits whose softmax is the mean prediction: anything that takes logits takes these."""
        return self.check_finite("logits", self.prediction_logits(self.prediction_maps(features)))

    def loss(self, features: Tensor, target: Tensor, *, reduction: str = "mean", noise: Tensor | None = None) -> Loss:
        """Return the training objective and its terms.

        Args:
            features: ``(..., in_features)``.
            target: ``(...)`` class indices; or soft labels ``(..., K)``, probabilities of the classes: the loss is then
                its expectation, ``sum_k target_k loss(features, k)``, which is also what mixup's weighted sum of two
                losses gives. It costs as much as one row for each label of a row that is not 0 (for softmax as much
                as one), and ``"mean"`` divides by the number of rows, as ``torch.nn.CrossEntropyLoss`` does.
            reduction: ``"mean"`` over the rows that count (weighted by ``class_weight``), ``"sum"``, or ``"none"``.
            noise: uniform numbers in [0, 1) of shape ``(..., K)`` (``(S, ..., K)`` where the head draws S > 1 masks)
                to use in place of the global generator's.
        """
        check_choice("reduction", reduction, REDUCTIONS)
        check_features(features, self.in_features)
        rows, shape = features.reshape(-1, self.in_features), features.shape[:-1]
        loss = self.loss_of(self.row_losses, rows, target, self.check_noise(noise, rows, shape), shape, reduction)
        if self.stateful:
            self.update(rows, target, shape)
        return loss

    def loss_of(
        self,
        row_losses: Callable[[Tensor, Tensor, Tensor | None], RowLosses],
        rows: Tensor,
        target: Tensor,
        noise: Tensor | None,
        shape: torch.Size,
        reduction: str,
    ) -> Loss:
        """Return the loss of a batch of this shape, given the function of N rows, labels and noise that computes it."""
        weight: Tensor | None = None
        if isinstance(target, Tensor) and target.is_floating_point():
            labels, counts = check_soft_target(target, shape, self.num_classes), None
            evaluate = row_losses if self.soft_targets else functools.partial(expected_losses, row_losses)
            losses = evaluate(rows, labels, noise)
        else:
            labels, counts = self.check_labels(target, shape)
            losses, weight = row_losses(rows, labels, noise), counts
            if self.class_weight is not None:
                weight = self.class_weight.to(losses.total.dtype)[labels]
                weight = weight if counts is None else weight * counts
        loss = losses.reduced(weight, counts, reduction, shape)
        self.check_finite("the losses", loss.total)
        return loss

    def update(
        self, rows: Tensor, target: Tensor, shape: torch.Size, logits: Mapping[str, Tensor] | None = None
    ) -> None:
        """Call :meth:`observe` where a loss should: in training mode, and not inside torch.func or torch.export.

        Soft labels count as the most probable class. Logits that are None are computed.
        """
        if not self.training:
            return
        with torch.no_grad():
            logits = self.logits(rows) if logits is None else logits
            if not is_transformed(logits["classifier"]):
                hard = target.argmax(-1) if target.is_floating_point() else target
                labels, counts = self.check_labels(hard, shape)
                self.observe(logits, labels, torch.ones_like(labels, dtype=torch.bool) if counts is None else counts)

    def row_losses(self, rows: Tensor, target: Tensor, noise: Tensor | None) -> RowLosses:
        """Return the loss of each of N rows of features; noise that is None is drawn."""
        return self.row_losses_of(self.logits(rows), target, noise)

    def row_losses_of(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> RowLosses:
        """Return the loss of each of N rows, from what :meth:`logits` returned."""
        terms = self.terms(logits, target, self.draw_noise(noise, logits["classifier"]))
        if self.class_weight is not None and not terms.keys() <= self.class_weighted:
            weight = self.class_weight[target]
            terms = {k: x if k in self.class_weighted else x * weight.to(x.dtype) for k, x in terms.items()}
        weights = self.term_weights()
        total: Tensor | None = None
        for name, term in terms.items():
            if term.shape != target.shape[:1]:
                raise InvalidValue(
                    f"{type(self).__name__}.terms: {name!r} must hold one number per row, shape ({len(target)},), got "
                    f"{tuple(term.shape)}"
                )
            weight_of_term = weights.get(name, 1.0)
            if total is None:
                total = term if weight_of_term == 1.0 else term * weight_of_term
            else:
                total = torch.add(total, term, alpha=weight_of_term)
        if total is None:
            raise InvalidValue(f"{type(self).__name__}.terms returned no terms")
        return RowLosses(total, tuple(terms), lambda: terms)

    def predict_proba(
        self,
        features: Tensor,
        mode: str | None = None,
        *,
        samples: int = 100,
        generator: torch.Generator | None = None,
        calibrated: bool = False,
    ) -> Tensor:
        """Return class probabilities ``(..., K)``, in float32 at least.

        ``mode="mean"`` puts rho in place of the masks (equation 15): ``softmax(forward(features))``, but for
        sparsemax. ``"mc"`` averages ``samples`` predictions, each with masks drawn from p(z | x) (equation 14), and
        ``"exact"`` is what that converges to, the sum over all 2^K masks (:func:`dropmax.exact.predictive`); a mask
        that drops every class leaves plain softmax, the limit of the paper's epsilon. A head that draws no masks at
        test time gives the same answer in every mode. ``calibrated=True`` applies the temperature that
        :attr:`calibration` has for the mode. Without a mode, that is ``"mean"``, or if calibrated the one that was
        best on the held-out rows.
        """
        check_flag("calibrated", calibrated)
        calibration = self.calibration if calibrated else None
        if calibrated and calibration is None:
            raise InvalidValue(
                "this head has not been calibrated: fit dropmax.calibration.Calibration on held-out rows and set "
                "head.calibration to it, or leave out calibrated=True"
            )
        if mode is None:
            mode = "mean" if calibration is None else calibration.mode
        check_choice("mode", mode, MODES)
        check_count("samples", samples)
        check_features(features, self.in_features)
        kind, rows = mode, features.reshape(-1, self.in_features)

        def answer(some: Tensor) -> Tensor:
            found = self.probabilities(self.prediction_maps(some), kind, samples, generator)
            return found if calibration is None else calibration.apply(found, kind)

        if (
            not self.masked
            or torch.is_grad_enabled()
            or is_traced(rows)
            or rows.shape[0] * self.num_classes <= BLOCK_NUMBERS
        ):
            found = answer(features)
        else:  # nothing of size batch x classes but what is returned
            found = _wide(rows).new_empty(*features.shape[:-1], self.num_classes)
            for here in row_blocks(len(rows), self.num_classes):
                found.view(-1, self.num_classes)[here] = answer(rows[here])
        return self.check_finite("probabilities", found)

    def outside_score(self, features: Tensor, kind: str = "energy") -> Tensor:
        """Return how unlike the training data each row is ``(...)``, see :func:`dropmax.outside.outside_score`."""
        from dropmax.outside import outside_score

        return outside_score(self, features, kind)

    def topk(
        self,
        features: Tensor,
        k: int,
        mode: str = "mean",
        *,
        samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> TopK:
        """Return the k most probable classes of each row, see :func:`dropmax.topk.topk`."""
        return topk(self, features, k, mode, samples=samples, generator=generator)

    def shard(self: _Self, mesh: Any) -> _Self:
        """Share the classes between the ranks of a device mesh, see :func:`dropmax.sharding.shard`."""
        from dropmax.sharding import shard

        return shard(self, mesh)

    def retain_probs(self, features: Tensor) -> Tensor:
        """Return rho(x), the probability ``(..., K)`` that each class is retained; ones where there are no masks."""
        check_features(features, self.in_features)
        return _wide(features).new_ones(*features.shape[:-1], self.num_classes)

    def predictive_std(self, features: Tensor) -> Tensor:
        """Return the exact standard deviation of ``p(y | x, z)`` over the masks; zeros where there are none."""
        check_features(features, self.in_features)
        return _wide(features).new_zeros(*features.shape[:-1], self.num_classes)

    def posterior_probs(self, features: Tensor, target: Tensor) -> Tensor:
        """Return q(z_k = 1 | x, y) ``(..., K)``: the masks the likelihood is trained with, 1 for the target."""
        check_target(target, features.shape[:-1], self.num_classes)
        return keep_target(self.retain_probs(features), target)

    def param_groups(self, weight_decay: float = 0.0, *, exempt: Iterable[str] = ("theta",)) -> list[dict[str, Any]]:
        """Return parameter groups for an optimiser, without weight decay on theta (section 4.4 of the paper).

        Args:
            weight_decay: for everything not exempt.
            exempt: which of the paper's groups ``"psi"``, ``"theta"``, ``"phi"`` get none.
        """
        exempt = tuple(exempt)
        for group in exempt:
            check_choice("parameter group", group, ("psi", "theta", "phi"))
        free = {id(p) for g in exempt if g in self.maps for p in getattr(self, self.maps[g]).parameters()}
        groups = [
            {"params": [p for p in self.parameters() if id(p) not in free], "weight_decay": weight_decay},
            {"params": [p for p in self.parameters() if id(p) in free], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def config(self) -> dict[str, Any]:
        """Return what :func:`dropmax.make_head` needs to build this head again.

        >>> from dropmax import Softmax, make_head
        >>> make_head(**Softmax(4, 3).config())
        Softmax(in_features=4, num_classes=3)
        """
        options = {k: getattr(self, k) for k in option_names(type(self))}
        if self.class_weight is not None:
            options["class_weight"] = self.class_weight.tolist()
        return {"name": self._own_name(), "in_features": self.in_features, "num_classes": self.num_classes, **options}

    def _own_name(self) -> str:
        """Return the name by which this class is found: its own, or where to import it."""
        from dropmax.heads.registry import ABLATIONS, FURTHER, HEADS

        known = any(heads.get(self.name) is type(self) for heads in (HEADS, FURTHER, ABLATIONS))
        return self.name if known else import_name(type(self)) or self.name

    def extra_repr(self) -> str:
        """Show the options that differ from their defaults."""
        shown = [f"in_features={self.in_features}", f"num_classes={self.num_classes}"]
        for name, default in option_defaults(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, Tensor):
                value = value.tolist()
            if value != default:
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    # --- shared by the heads -------------------------------------------------------------------------------------

    def cross_entropy(self, logits: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the cross entropy of each row with the head's label smoothing, over the classes of ``mask`` if given.

        For a head that names the term in :attr:`class_weighted`, also with the class weights.
        """
        weight = self.class_weight if "cross_entropy" in self.class_weighted else None
        smoothing = self.label_smoothing
        return cross_entropy(logits, target, label_smoothing=smoothing, smoothing_mask=mask, class_weight=weight)

    def subset_cross_entropy(self, logits: Tensor, target: Tensor, kept: Tensor) -> Tensor:
        """Return the cross entropy among the classes whose 0/1 mask ``kept`` is 1."""
        logits = _wide(logits)
        # The lowest finite number, not -inf: label smoothing multiplies it by zero.
        return self.cross_entropy(logits.masked_fill(kept == 0, torch.finfo(logits.dtype).min), target, kept)

    def prediction_maps(self, features: Tensor) -> dict[str, Tensor]:
        """Return the logits of the maps in :attr:`predicts_with`, after checking the features."""
        check_features(features, self.in_features)
        return {name: getattr(self, name)(features) for name in self.predicts_with}

    def check_finite(self, what: str, x: Tensor) -> Tensor:
        """Refuse results that are not finite although the features are."""
        advice = f"the features are finite, so the weights of {self.name!r} are not, or are too large for the dtype"
        return check_finite(what, x, advice)

    def check_labels(self, target: Tensor, batch_shape: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Return the labels (N,), with any valid one for rows that do not count, and which count; None: all do."""
        labels = check_target(target, batch_shape, self.num_classes, self.ignore_index).reshape(-1)
        counts = labels != self.ignore_index
        if values_are_readable(counts) and counts.all():
            return labels, None
        return labels.masked_fill(~counts, 0), counts

    def check_noise(self, noise: Tensor | None, rows: Tensor, batch_shape: Sequence[int]) -> Tensor | None:
        """Return a caller's noise in the shape that :meth:`terms` gets, or refuse it."""
        shape = self.noise_shape(len(rows))
        if noise is None or shape is None:
            return None
        expected = (*shape[:-2], *batch_shape, self.num_classes)
        if tuple(noise.shape) != expected:
            raise InvalidValue(f"noise has shape {tuple(noise.shape)}, but this call needs {expected}")
        return noise.to(_wide(rows).dtype).reshape(shape)

    def draw_noise(self, noise: Tensor | None, like: Tensor) -> Tensor | None:
        """Return the noise of :meth:`terms` for as many rows as ``like`` has: a caller's, or drawn."""
        shape = self.noise_shape(len(like))
        if shape is None or noise is not None:
            return noise
        dtype = _wide(like).dtype
        if torch.compiler.is_compiling() and not is_exporting():  # a compiler fuses the hash into what uses the noise
            return uniform(self.draw_words(shape, like.device), math.prod(shape[:-1]), dtype).view(*shape)
        return self._of_first_rank(torch.rand(*shape, dtype=dtype, device=like.device))

    def draw_words(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Draw the words (:mod:`dropmax.noise`) of noise of this shape, alike on all ranks that share the classes."""
        count, generator = math.prod(shape[:-1]) + shape[-1], None
        if self.partition is not None:  # one number crosses the network, not one per class
            seed = self._of_first_rank(torch.randint(2**62, (1,), device=device))
            generator = torch.Generator(device).manual_seed(int(seed))
        return draw_words(count, device, generator)

    def _of_first_rank(self, drawn: Tensor) -> Tensor:
        return drawn if self.partition is None else self.partition.of_first_rank(drawn)


def keep_target(mask: Tensor, target: Tensor) -> Tensor:
    """Return the mask with 1 for the target of each row.

    >>> keep_target(torch.zeros(2, 3), torch.tensor([0, 2]))
    tensor([[1., 0., 0.],
            [0., 0., 1.]])
    """
    return mask.scatter(-1, target.long().unsqueeze(-1), 1.0)
