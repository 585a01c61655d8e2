"""What a head is: the same methods for each, so that swapping one for another changes one word."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from dropmax.checks import (
    check_choice,
    check_class_weight,
    check_count,
    check_features,
    check_finite,
    check_probability,
    check_target,
    is_exporting,
)
from dropmax.errors import InvalidType, InvalidValue
from dropmax.functional import _wide, cross_entropy
from dropmax.heads.options import option_defaults, option_names, unknown_option
from dropmax.noise import draw_seed, uniform
from dropmax.topk import BLOCK_NUMBERS, TopK, linear_part, row_blocks, streamed_topk

if TYPE_CHECKING:
    from dropmax.sharding import ShardedLinear

#: How :meth:`Head.predict_proba` treats the masks.
MODES = ("mean", "mc", "exact")
REDUCTIONS = ("mean", "sum", "none")


class Loss(NamedTuple):
    """What :meth:`Head.loss` returns: the number to minimise, and the terms it is made of.

    Every term is reported as such, before its weight and sign: ``entropy`` is subtracted in ``total``.

    >>> from dropmax import DropMax
    >>> head = DropMax(in_features=2, num_classes=3)
    >>> total, terms = head.loss(torch.zeros(1, 2), torch.tensor([0]))
    >>> sorted(terms)
    ['auxiliary', 'cross_entropy', 'entropy', 'kl']
    """

    total: Tensor
    terms: dict[str, Tensor]


class Head(nn.Module):
    """The last layer of a classifier: ``forward``, ``loss``, ``predict_proba`` and what the masks look like.

    Args:
        in_features: size of the feature vector h.
        num_classes: K, at least 2.
        label_smoothing: share of the label spread over the other classes; over the retained ones where there is a mask.
        class_weight: one weight a class, as ``weight`` of ``torch.nn.CrossEntropyLoss``.
        ignore_index: label of rows that do not count.
        device, dtype: of the parameters.

    Features may have any batch shape, ``(..., in_features)`` with targets ``(...)``.
    """

    #: The name in :data:`dropmax.HEADS`.
    name: ClassVar[str]

    #: Which of the paper's parameter groups each linear map is.
    maps: ClassVar[dict[str, str]] = {"psi": "classifier"}

    classifier: nn.Linear
    class_weight: Tensor | None

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
        for attribute in self.maps.values():
            setattr(self, attribute, nn.Linear(in_features, num_classes, device=device, dtype=dtype))
        self.register_buffer("class_weight", check_class_weight(class_weight, num_classes, device), persistent=False)

    # --- what a user calls ---------------------------------------------------------------------------------------

    def forward(self, features: Tensor) -> Tensor:
        """Return ``(..., K)`` logits whose softmax is the mean prediction: anything that eats logits eats these."""
        check_features(features, self.in_features)
        logits: Tensor = self._finite("logits", self.classifier(features))
        return logits

    def loss(self, features: Tensor, target: Tensor, *, reduction: str = "mean", noise: Tensor | None = None) -> Loss:
        """Return the training objective and its terms.

        Args:
            features: ``(..., in_features)``.
            target: ``(...)`` class indices.
            reduction: ``"mean"`` over the rows that count (weighted by ``class_weight``), ``"sum"``, or ``"none"``.
            noise: uniform numbers in [0, 1) of shape ``(..., K)`` (``(S, ..., K)`` where the head draws S > 1 masks)
                to use in place of the global generator's.
        """
        check_choice("reduction", reduction, REDUCTIONS)
        check_features(features, self.in_features)

        def terms_of(rows: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return self._row_terms(rows, labels, noise, features.shape[:-1])

        return self._reduced(terms_of, self._coefficients(), features, target, reduction)

    def _reduced(
        self,
        terms_of: Callable[[Tensor, Tensor], dict[str, Tensor]],
        coefficients: Mapping[str, float],
        inputs: Tensor,
        target: Tensor,
        reduction: str,
    ) -> Loss:
        """Reduce the terms of each row, ``terms_of(rows, labels)``, over the rows that count."""
        target = check_target(target, inputs.shape[:-1], self.num_classes, self.ignore_index)
        rows = inputs.reshape(-1, inputs.shape[-1])
        labels = target.reshape(-1)
        counts = labels != self.ignore_index
        labels = labels.masked_fill(~counts, 0)  # any valid index: these rows get no weight
        terms = terms_of(rows, labels)

        weight = counts.to(terms["cross_entropy"].dtype)
        if self.class_weight is not None:
            weight = weight * self.class_weight.to(weight.dtype)[labels]
        weights = weight
        if self.class_weight is not None:
            # The cross entropy has its class weights already: with label smoothing they differ from class to class.
            weights = torch.stack([counts.to(weight.dtype) if k == "cross_entropy" else weight for k in terms])
        # All terms at once: with few classes a step is short, and every call counts.
        weighted = torch.stack(list(terms.values())) * weights
        if reduction == "none":
            weighted = weighted.reshape(-1, *target.shape)
        else:
            weighted = weighted.sum(-1)
            if reduction == "mean":
                # Nothing to average over gives 0 with a zero gradient, never 0/0.
                weighted = weighted / weight.sum().clamp_min(torch.finfo(weight.dtype).tiny)
        reduced = dict(zip(terms, weighted.unbind(), strict=True))
        total = coefficients["cross_entropy"] * reduced["cross_entropy"]
        for name, term in reduced.items():
            if name != "cross_entropy":
                total = torch.add(total, term, alpha=coefficients[name])
        return Loss(self._finite("the losses", total), reduced)

    def predict_proba(
        self,
        features: Tensor,
        mode: str = "mean",
        *,
        samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return class probabilities ``(..., K)``, in float32 at least.

        ``mode="mean"`` puts rho in place of the masks (equation 15): ``softmax(forward(features))``, but for
        sparsemax. ``"mc"`` averages ``samples`` predictions, each with masks drawn from p(z | x) (equation 14), and
        ``"exact"`` is what that converges to, the sum over all 2^K masks (:func:`dropmax.exact.predictive`); a mask
        that drops every class leaves plain softmax, the limit of the paper's epsilon. A head that draws no masks at
        test time gives the same answer in every mode.
        """
        check_choice("mode", mode, MODES)
        check_count("samples", samples)
        return self._finite("probabilities", self._probabilities(features, mode, samples, generator))

    @torch.no_grad()
    def topk(
        self,
        features: Tensor,
        k: int,
        mode: str = "mean",
        *,
        samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> TopK:
        """Return the k most probable classes ``(..., k)`` of each row: ``values``, probabilities, and ``indices``.

        Equals ``predict_proba(features, mode).topk(k)`` without ever holding probabilities of all rows and classes: the
        mean prediction is computed for a block of classes at a time, the other modes for a block of rows. As with
        ``torch.topk``, the order of classes with equal probability is not defined. There is no gradient.

        >>> from dropmax import DropMax
        >>> values, indices = DropMax(in_features=4, num_classes=9).topk(torch.randn(2, 4), k=3)
        >>> indices.shape
        torch.Size([2, 3])
        """
        check_choice("mode", mode, MODES)
        check_count("samples", samples)
        check_count("k", k)
        check_features(features, self.in_features)
        if k > self.num_classes:
            raise InvalidValue(f"k must be at most the number of classes, {self.num_classes}, got {k}")
        rows = features.reshape(-1, self.in_features)
        large = len(rows) * self.num_classes > BLOCK_NUMBERS
        if mode == "mean" and self._logits_of_classes(rows[:0], slice(0, 1)) is not None and (large or self._shards):
            best = self._streamed_topk(rows, k)
        else:
            blocks = row_blocks(len(rows), self.num_classes) if len(rows) else [slice(0, 0)]
            parts = [self._probabilities(rows[here], mode, samples, generator).topk(k) for here in blocks]
            best = TopK(torch.cat([p.values for p in parts]), torch.cat([p.indices for p in parts]))
        self._finite("probabilities", best.values)
        return TopK(*(x.reshape(*features.shape[:-1], k) for x in best))

    def shard(self, mesh: Any) -> Head:
        """Share the classes between the ranks of a one-dimensional device mesh, in place; return the head.

        Each rank keeps its part of every linear map (:mod:`dropmax.sharding`). All ranks of the mesh must be given the
        same features and targets; they get the same loss, and the gradients they would get on one machine.
        :func:`dropmax.sharding.full_state_dict` gathers a checkpoint, and ``load_state_dict`` takes one of the whole
        head. Call it before the optimiser is made. For data parallelism on top, take a mesh of two dimensions, shard
        along one and give DistributedDataParallel the group of the other::

            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "classes"))
            model = Classifier(net, head.shard(mesh["classes"]))
            model = DistributedDataParallel(model, process_group=mesh["data"].get_group())
        """
        from dropmax.sharding import ShardedLinear, group_of

        group = group_of(mesh, self.num_classes)
        for name in self.maps.values():
            linear = getattr(self, name)
            if type(linear) is not nn.Linear:
                raise InvalidValue(
                    f"{name} is a {type(linear).__name__}: a head is sharded once, and before it is changed"
                )
        for name in self.maps.values():
            setattr(self, name, ShardedLinear(getattr(self, name), group))
        return self

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
        return {"name": self.name, "in_features": self.in_features, "num_classes": self.num_classes, **options}

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

    # --- what a head fills in ------------------------------------------------------------------------------------

    def _row_terms(
        self, rows: Tensor, target: Tensor, noise: Tensor | None, batch_shape: Sequence[int]
    ) -> dict[str, Tensor]:
        """Return what :meth:`_terms` returns, drawing the noise that a caller did not bring."""
        return self._terms(rows, target, self._noise(rows, noise, batch_shape))

    def _terms(self, rows: Tensor, target: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """Return each term of the objective for each row; ``noise`` is empty where the head asked for none."""
        return self._terms_of_logits(self._mapped(rows), target, noise)

    def _terms_of_logits(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """Return what :meth:`_terms` returns, from what :meth:`_mapped` returns: no parameter is used here."""
        return {"cross_entropy": self._cross_entropy(logits["classifier"], target)}

    def _loss_inputs(self) -> tuple[str, ...]:
        """Return the names of the maps, attributes of this head, whose outputs the loss is made of."""
        return tuple(self.maps.values())

    def _mapped(self, rows: Tensor) -> dict[str, Tensor]:
        return {name: getattr(self, name)(rows) for name in self._loss_inputs()}

    def _probabilities(self, features: Tensor, mode: str, samples: int, generator: torch.Generator | None) -> Tensor:
        """Return what :meth:`predict_proba` returns, its options having been checked."""
        return _wide(self(features)).softmax(-1)

    def _logits_of_classes(self, rows: Tensor, here: slice) -> Tensor | None:
        """Return the logits of the mean prediction for some of this rank's classes; None if others matter to them."""
        if type(self).forward is not Head.forward or type(self)._probabilities is not Head._probabilities:
            return None
        return _wide(linear_part(self.classifier, rows, here))

    def _coefficients(self) -> dict[str, float]:
        """Return the weight of each term in the total."""
        return {"cross_entropy": 1.0}

    def noise_shape(self, num_rows: int) -> tuple[int, ...] | None:
        """Return the shape of the uniform noise :meth:`loss` takes for this many rows; None where it draws none."""
        return None

    @property
    def _shards(self) -> ShardedLinear | None:
        """The class logits' map where ranks share the classes."""
        return self.classifier if hasattr(self.classifier, "gather") else None  # type: ignore[return-value]

    def _streamed_topk(self, rows: Tensor, k: int) -> TopK:
        def logits_of(here: slice) -> Tensor:
            logits = self._logits_of_classes(rows, here)
            if logits is None:
                raise ValueError(f"{self.name} has no logits of some classes")
            return logits

        shards = self._shards
        mine = self.num_classes if shards is None else shards.out_features
        values, indices, normaliser = streamed_topk(logits_of, len(rows), mine, k)
        if shards is not None:
            values, indices, normaliser = shards.best_of_all(values, indices, normaliser, k)
        return TopK((values - normaliser.unsqueeze(-1)).exp(), indices)

    # --- shared by the heads -------------------------------------------------------------------------------------

    def _cross_entropy(self, logits: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        return cross_entropy(
            logits,
            target,
            label_smoothing=self.label_smoothing,
            smoothing_mask=mask,
            class_weight=self.class_weight,
        )

    def _finite(self, what: str, x: Tensor) -> Tensor:
        """Refuse what came out of finite features and is not finite."""
        advice = f"the features are finite, so the weights of {self.name!r} are not, or are too large for the dtype"
        return check_finite(what, x, advice)

    def _class_weighted(self, nll: Tensor, target: Tensor) -> Tensor:
        return nll if self.class_weight is None else nll * self.class_weight.to(nll.dtype)[target]

    def _subset_cross_entropy(self, logits: Tensor, target: Tensor, kept: Tensor) -> Tensor:
        """Return the cross entropy among the classes whose 0/1 mask ``kept`` is 1."""
        logits = _wide(logits)
        # The lowest finite number, not -inf: label smoothing multiplies it by zero.
        return self._cross_entropy(logits.masked_fill(kept == 0, torch.finfo(logits.dtype).min), target, kept)

    def _noise(self, rows: Tensor, noise: Tensor | None, batch_shape: Sequence[int]) -> Tensor:
        dtype = _wide(rows).dtype
        shape = self.noise_shape(len(rows))
        if shape is None:
            return rows.new_empty(0)
        if noise is None:
            return self._drawn(shape, dtype, rows.device)
        expected = (*shape[:-2], *batch_shape, self.num_classes)
        if tuple(noise.shape) != expected:
            raise InvalidValue(f"noise has shape {tuple(noise.shape)}, but this call needs {expected}")
        return noise.to(dtype).reshape(shape)

    def _drawn(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Draw uniform noise: by a hash where ranks must agree or a compiler can fuse it, else by torch's generator."""
        if self._shards is None and not (torch.compiler.is_compiling() and not is_exporting()):
            return torch.rand(*shape, dtype=dtype, device=device)
        return uniform(self._seed(device), math.prod(shape[:-1]), 0, shape[-1], dtype).view(*shape)

    def _seed(self, device: torch.device) -> Tensor:
        """Draw a seed, the same on all ranks that share the classes."""
        seed = draw_seed(device)
        if self._shards is not None:
            from dropmax.sharding import shared_seed

            seed = shared_seed(seed, self._shards.group)
        return seed


def keep_target(mask: Tensor, target: Tensor) -> Tensor:
    """Return the mask with 1 for the target of each row.

    >>> keep_target(torch.zeros(2, 3), torch.tensor([0, 2]))
    tensor([[1., 0., 0.],
            [0., 0., 1.]])
    """
    return mask.scatter(-1, target.long().unsqueeze(-1), 1.0)
