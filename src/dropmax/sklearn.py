"""DropMax, and every other head, as a scikit-learn classifier: ``fit``, ``predict_proba``, ``confusable_with``.

See docs/sklearn.md. Needs scikit-learn: ``pip install "dropmax[sklearn]"``.
"""

from __future__ import annotations

import contextlib
import numbers
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dropmax.checks import NotFinite, check_choice, check_count, check_positive, check_probability, check_weight
from dropmax.classifier import Classifier
from dropmax.errors import InvalidType, InvalidValue, MissingDependency, RunError
from dropmax.heads import MODES, Head, find_head, make_head
from dropmax.sklearn_rows import (
    Examples,
    blocks,
    check_known,
    class_weights,
    fit_scaler,
    held_out_rows,
    merge_equal,
    standardised,
)
from dropmax.sklearn_step import choose_step
from dropmax.workbench.evaluation import Outputs, answer
from dropmax.workbench.networks import MLP, feature_size
from dropmax.workbench.networks.common import check_sizes

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_array, check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data

    from dropmax.sklearn_sets import ConformalMixin
except ImportError as error:
    raise MissingDependency.extra("scikit-learn 1.6 or newer", "sklearn", "dropmax.sklearn") from error

__all__ = ["DropMaxClassifier"]

#: A prediction must not depend on which other rows are asked about, and a product in float32 does depend, in the
#: seventh digit, on the number of rows. So the network always sees this many, the last ones filled up with zeros.
_ROWS = 128

#: Options of a head that the estimator sets itself.
_RESERVED = {
    "class_weight": ": pass class_weight to the estimator",
    "device": ": pass device to the estimator",
    "dtype": ": the estimator computes in torch.float32",
    "ignore_index": ": give such rows sample_weight 0",
}


class DropMaxClassifier(ConformalMixin, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A multi-layer perceptron that ends in a DropMax head, trained with AdamW in float32.

    Its loss is the weighted mean over rows of ``head.loss``; its probabilities are ``head.predict_proba``. The fit
    depends on ``random_state`` and on the weighted *set* of examples: equal rows with equal labels are merged and their
    weights added, and rows are put in an order of their own. So a row of weight 2 is that row twice, a row of weight 0
    is no row, and shuffling the data changes nothing, to the last bit and for every head and batch size.

    Args:
        hidden_layer_sizes: units of each hidden layer, relu after each; ``()`` makes a linear classifier.
        head: a name (:func:`dropmax.heads.find_head`), or a class of yours that derives from ``dropmax.Head``.
        head_options: options of the head.
        network: in place of the perceptron, a function from the number of features to an ``nn.Module`` that maps
            ``(N, n_features)`` to feature vectors ``(N, d)``.
        class_weight: a dict from label to weight (1 where it has none), or ``"balanced"``: weights inversely
            proportional to the weighted class frequencies. Multiplies ``sample_weight``.
        standardize: subtract each input's weighted mean and divide by its standard deviation before the network.
        batch_size: distinct examples per step; ``"auto"`` is a tenth of them, at least 16 and at most 200.
        learning_rate_init: of AdamW.
        weight_decay: of AdamW; a step multiplies weights by ``1 - learning_rate_init * weight_decay``, except those of
            the retain map, as in the paper.
        max_iter: passes over the data, at most.
        tol, n_iter_no_change: training ends after so many passes in a row in which the loss (with early stopping, the
            log loss of the validation rows) was not better than its best by ``tol``.
        early_stopping: hold out a stratified ``validation_fraction`` of the distinct examples, and keep the weights
            that were best on it. Where no class has an example to spare, nothing is held out.
        validation_fraction: share held out for early stopping.
        refit: after early stopping, train again on all rows for the best number of passes. Otherwise the
            held-out rows teach the model nothing, and the weights are those that were best on them.
        dropout: share of the hidden units left out in every step.
        mode: how to predict unless told otherwise, see :meth:`predict_proba`.
        device: where torch computes.
        random_state: seeds the weights, the order of the batches, the masks and the validation split.
        verbose: print a line every ten passes.

    Attributes:
        classes_: the labels, sorted.
        model_: the trained :class:`dropmax.Classifier`, in float32.
        scaler_: the fitted ``StandardScaler``, or None.
        loss_curve_, n_iter_: training loss of each pass, and how many there were.
        validation_curve_: with early stopping, the log loss of the validation rows after each pass.
        n_features_in_, feature_names_in_: as everywhere in scikit-learn.

    >>> from sklearn.datasets import load_wine
    >>> X, y = load_wine(return_X_y=True)
    >>> wines = load_wine().target_names[y]
    >>> model = DropMaxClassifier(random_state=0, learning_rate_init=0.01).fit(X, wines)
    >>> model.score(X, wines)
    1.0
    >>> model.predict_proba(X[:2], mode="exact").shape
    (2, 3)
    >>> model.predict(X[[68]]).tolist(), model.confusable_with(X[[68]])
    (['class_1'], [['class_2']])
    """

    def __init__(
        self,
        hidden_layer_sizes: int | Sequence[int] = (512,),
        *,
        head: str | type[Head] = "dropmax",
        head_options: Mapping[str, Any] | None = None,
        network: Callable[[int], nn.Module] | None = None,
        class_weight: Mapping[Any, float] | str | None = None,
        standardize: bool = True,
        batch_size: int | str = "auto",
        learning_rate_init: float = 1e-3,
        weight_decay: float = 0.3,
        max_iter: int = 200,
        tol: float = 1e-4,
        n_iter_no_change: int = 10,
        early_stopping: bool = True,
        validation_fraction: float = 0.1,
        refit: bool = True,
        dropout: float = 0.5,
        mode: str = "mean",
        device: str = "cpu",
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.head = head
        self.head_options = head_options
        self.network = network
        self.class_weight = class_weight
        self.standardize = standardize
        self.batch_size = batch_size
        self.learning_rate_init = learning_rate_init
        self.weight_decay = weight_decay
        self.max_iter = max_iter
        self.tol = tol
        self.n_iter_no_change = n_iter_no_change
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.refit = refit
        self.dropout = dropout
        self.mode = mode
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    _kept_optimizer: torch.optim.Optimizer | None
    validation_curve_: list[float]

    # --- training ------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> DropMaxClassifier:
        """Train from scratch on rows X ``(n, n_features)``, an array, data frame or sparse matrix, and labels y."""
        self._check_parameters()
        X, y, weight = self._validated(X, y, sample_weight, reset=True)
        self._seed = int(check_random_state(self.random_state).randint(2**31))
        with _random_numbers(self._seed):
            self._start(np.unique(y))
            X, y, weight = self._examples(X, y, weight)
            weight = weight / weight.mean()  # the scale of the weights must not act as a learning rate
            chosen = np.zeros(len(y), bool)
            if self.early_stopping:
                chosen = held_out_rows(y, self.validation_fraction, np.random.RandomState(self._seed))
            if self.scaler_ is not None:
                fit_scaler(self.scaler_, X[~chosen], weight[~chosen])
            train, held_out = (
                Examples(X[rows], y[rows], weight[rows], self.scaler_, self.device) for rows in (~chosen, chosen)
            )
            self._train(train, held_out)
        if self.refit and len(held_out):
            with _random_numbers(self._seed):
                self._refit(X, y, weight)
        self.model_.eval()
        return self

    def _refit(self, X: Any, y: NDArray[Any], weight: NDArray[Any]) -> None:
        """Train a new network on all examples, for as many passes as were best for the held-out ones."""
        curve: list[float] = self.validation_curve_
        passes = 1 + int(np.argmin(curve))
        self._start(self.classes_)
        self.validation_curve_ += curve
        if self.scaler_ is not None:
            fit_scaler(self.scaler_, X, weight)
        examples = Examples(X, y, weight, self.scaler_, self.device)
        optimizer = self._optimizer()
        for _ in range(passes):
            self._epoch(optimizer, examples)
        if self.verbose:
            print(f"{passes} passes over all rows: loss {self.loss_curve_[-1]:.4f}")

    def _train(self, train: Examples, held_out: Examples) -> None:
        """Make passes until the loss, of the held-out examples where there are any, no longer falls."""
        optimizer = self._optimizer()
        best, waited, best_state = np.inf, 0, {}
        for _ in range(self.max_iter):
            score = self._epoch(optimizer, train)
            if len(held_out):
                score = self._log_loss(held_out)
                self.validation_curve_.append(score)
            self._say(final=False)
            waited = waited + 1 if score > best - self.tol else 0
            if score < best:
                best = score
                if len(held_out) and not self.refit:  # which starts anew
                    best_state = {name: value.clone() for name, value in self.model_.state_dict().items()}
            if waited >= self.n_iter_no_change:
                break
        else:
            warnings.warn(
                f"stopped after max_iter={self.max_iter} passes while the loss was still falling: raise max_iter "
                "or learning_rate_init",
                ConvergenceWarning,
                stacklevel=3,
            )
        self._say(final=True)
        if best_state:
            self.model_.load_state_dict(best_state)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> DropMaxClassifier:
        """Train for one pass over these rows, going on from what was learned before.

        The first call needs ``classes``, all labels that will ever come. Inputs are standardised with the mean and
        standard deviation of all rows seen so far. Adam's state is kept from call to call, though not from ``fit``. No
        rows are held out, whatever ``early_stopping`` says.
        """
        self._check_parameters()
        if isinstance(self.class_weight, str):
            raise InvalidValue(
                f"class_weight={self.class_weight!r} needs all of y at once: give partial_fit a dict of weights"
            )
        first = not hasattr(self, "classes_")
        if first and classes is None:
            raise InvalidValue("the first call of partial_fit needs classes=, all labels that will ever come")
        if classes is not None:
            classes = np.unique(classes)
            if not first and not np.array_equal(classes, self.classes_):
                raise InvalidValue(
                    f"classes={classes.tolist()} are not those of the first call, {self.classes_.tolist()}"
                )
        X, y, weight = self._validated(X, y, sample_weight, reset=first)
        check_known(np.unique(y).tolist(), classes if first else self.classes_)
        if first:
            self._seed = int(check_random_state(self.random_state).randint(2**31))
        # Each call draws numbers of its own, and the same ones again when the same calls are repeated.
        with _random_numbers(self._seed + (0 if first else self.n_iter_)):
            if first:
                self._start(classes)
            X, y, weight = self._examples(X, y, weight)
            if self.scaler_ is not None:
                fit_scaler(self.scaler_, X, weight)
            if self._kept_optimizer is None:
                self._kept_optimizer = self._optimizer()
            self.model_.head.calibration = None  # that of the model before
            self._epoch(self._kept_optimizer, Examples(X, y, weight, self.scaler_, self.device))
            self._say(final=False)
        self.model_.eval()
        return self

    def _validated(self, X: Any, y: Any, sample_weight: Any, reset: bool) -> tuple[Any, Any, NDArray[np.float64]]:
        """Return the rows that count, in the shapes and dtypes scikit-learn agrees on."""
        X, y = validate_data(self, X, y, reset=reset, accept_sparse="csr", dtype=(np.float64, np.float32))
        check_classification_targets(y)
        if sample_weight is None:
            return X, y, np.ones(len(y))
        weight = check_array(sample_weight, ensure_2d=False, dtype=np.float64, input_name="sample_weight")
        if weight.shape != y.shape:
            raise InvalidValue(f"sample_weight must hold one number for each of the {len(y)} rows, got {weight.shape}")
        if (weight < 0).any():
            row = int(np.flatnonzero(weight < 0)[0])
            raise InvalidValue(f"sample_weight must not be negative, got {weight[row]} in row {row}")
        counts = weight > 0
        if not counts.any():
            raise InvalidValue("every sample_weight is zero: nothing is left to learn from")
        return (X, y, weight) if counts.all() else (X[counts], y[counts], weight[counts])

    def _start(self, classes: NDArray[Any]) -> None:
        """Set what a fitted estimator has, with a new network."""
        if len(classes) < 2:
            raise InvalidValue(f"a classifier needs at least 2 classes, got only {classes.tolist()} (1 class)")
        n_features = self.n_features_in_
        if self.network is None:
            sizes: Any = self.hidden_layer_sizes
            sizes = [sizes] if isinstance(sizes, numbers.Integral) else sizes
            net: nn.Module = MLP(n_features, check_sizes("hidden_layer_sizes", sizes), _plain(self.dropout))
        else:
            net = self.network(n_features)
            if not isinstance(net, nn.Module):
                raise InvalidType(f"network({n_features}) must return a torch.nn.Module, got {type(net).__name__}")
        head = make_head(self.head, feature_size(net, (n_features,)), len(classes), **dict(self.head_options or {}))
        self.classes_ = classes
        self.model_ = Classifier(net, head).to(device=self.device, dtype=torch.float32)
        self.scaler_ = StandardScaler() if self.standardize else None
        self.loss_curve_: list[float] = []
        self.validation_curve_ = []
        self.n_iter_ = 0
        self._kept_optimizer = None

    def _examples(self, X: Any, y: NDArray[Any], weight: NDArray[Any]) -> tuple[Any, NDArray[Any], NDArray[Any]]:
        """Return distinct rows, class indices and weights: sample weight times class weight."""
        labels = np.searchsorted(self.classes_, y)
        X, labels, weight = merge_equal(X, labels, weight)
        weight = weight * class_weights(self.class_weight, self.classes_, labels, weight)[labels]
        counts = weight > 0
        if not counts.any():
            raise InvalidValue("class_weight gives every row weight zero: nothing is left to learn from")
        return (X, labels, weight) if counts.all() else (X[counts], labels[counts], weight[counts])

    def _optimizer(self) -> torch.optim.Optimizer:
        groups: dict[float, list[nn.Parameter]] = {}  # by weight decay: one call of the optimiser's kernel for each
        for group in self.model_.param_groups(self.weight_decay):
            groups.setdefault(group["weight_decay"], []).extend(group["params"])
        parameters = [{"params": params, "weight_decay": decay} for decay, params in groups.items()]
        return torch.optim.AdamW(parameters, lr=self.learning_rate_init, fused=True)

    def _epoch(self, optimizer: torch.optim.Optimizer, examples: Examples) -> float:
        """Go through the examples once, in a random order, and return their mean loss."""
        model = self.model_.train()
        # Ten steps per pass at least, or small data would need hundreds of passes.
        size = min(200, max(16, len(examples) // 10)) if self.batch_size == "auto" else int(self.batch_size)
        step = choose_step(model, size)
        sums = []
        with self._advice_on_divergence():
            for x, target, weight in examples.batches(torch.randperm(len(examples)), size):
                sums.append(step(model, x, target, weight) * len(target))  # with the gradients
                optimizer.step()
            mean = float(torch.stack(sums).sum()) / len(examples)
            if not np.isfinite(mean):
                raise NotFinite(f"the loss became {mean}")
        self.n_iter_ += 1
        self.loss_curve_.append(mean)
        return mean

    @contextlib.contextmanager
    def _advice_on_divergence(self) -> Iterator[None]:
        try:
            yield
        except NotFinite as error:
            advice = f"lower learning_rate_init={self.learning_rate_init}"
            raise RunError(f"{error}; in pass {self.n_iter_ + 1}: {advice}") from None

    @torch.no_grad()
    def _log_loss(self, examples: Examples) -> float:
        """Return the weighted mean of -log p of the labels, in evaluation mode."""
        model = self.model_.eval()
        total, weights = 0.0, 0.0
        for x, target, weight in examples.batches(torch.arange(len(examples)), 2048):
            with self._advice_on_divergence():
                chosen = model.predict_proba(x).gather(1, target[:, None])[:, 0].double()
            losses = -chosen.clamp_min(np.finfo(np.float64).tiny).log()
            total += float(losses.sum() if weight is None else (weight * losses).sum())
            weights += float(len(target) if weight is None else weight.double().sum())
        return total / weights

    def _say(self, *, final: bool) -> None:
        if self.verbose and (final or self.n_iter_ % 10 == 0):
            held_out = f", validation log loss {self.validation_curve_[-1]:.4f}" if self.validation_curve_ else ""
            print(f"pass {self.n_iter_}: loss {self.loss_curve_[-1]:.4f}{held_out}{' (the last)' if final else ''}")

    # --- prediction ----------------------------------------------------------------------------------------------

    def predict_proba(
        self, X: Any, mode: str | None = None, samples: int = 100, *, calibrated: bool = False
    ) -> NDArray[np.float64]:
        """Return probabilities ``(n, n_classes)``, columns in the order of ``classes_``.

        Args:
            X: rows as in :meth:`fit`.
            mode: ``"mean"`` puts the retain probability in place of the mask, ``"mc"`` averages over ``samples`` drawn
                masks (the same ones at every call), ``"exact"`` over all 2^K; by default the estimator's own ``mode``.
            samples: masks drawn by ``"mc"``.
            calibrated: whether to apply the temperature that :meth:`conformalize` found, without a mode that of the
                best one.
        """
        if mode is not None:
            check_choice("mode", mode, MODES)
        if not calibrated:
            return _as_probabilities(self._outputs(X, mode or self.mode, samples).probs)
        calibration = self._calibrated()
        probs = self._outputs(X, mode, samples).probs
        return _as_probabilities(probs if mode is None else calibration.apply(probs, mode))

    def predict_log_proba(self, X: Any, mode: str | None = None, samples: int = 100) -> NDArray[np.float64]:
        """Return the logarithm of :meth:`predict_proba`, and -708 where that is zero."""
        probs = self.predict_proba(X, mode, samples)
        logs: NDArray[np.float64] = np.log(np.maximum(probs, np.finfo(np.float64).tiny))
        return logs

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Return the logits ``(n, n_classes)`` of mode ``"mean"``; of two classes, second minus first ``(n,)``."""
        logits = np.concatenate([self.model_.head(h).numpy(force=True)[:n] for h, n in self._features(X)])
        logits = logits.astype(np.float64)
        return logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable label of each row."""
        best = self.predict_proba(X).argmax(1)
        labels: NDArray[Any] = self.classes_[best]
        return labels

    def retain_proba(self, X: Any) -> NDArray[np.float64]:
        """Return rho ``(n, n_classes)``: how much attention each class deserves; ones for a head without masks."""
        retain: NDArray[np.float64] = self._outputs(X).retain.double().numpy()
        return retain

    def _outputs(self, X: Any, mode: str | None = None, samples: int = 100) -> Outputs:
        """Return what the head answers for these rows in a mode as it comes, or else the calibrated answer."""
        check_is_fitted(self)
        generator, head = torch.Generator(self.device).manual_seed(self._seed), self.model_.head
        if mode is None and head.calibration is None:
            mode = self.mode
        parts: list[Outputs] = []
        for features, count in self._features(X):
            part = answer(head, features, mode=mode, samples=samples, generator=generator)
            outside = None if part.outside is None else part.outside[:count]
            parts.append(replace(part, probs=part.probs[:count], retain=part.retain[:count], outside=outside))
        return Outputs.join(parts)

    @torch.no_grad()
    def _features(self, X: Any) -> Iterator[tuple[Tensor, int]]:
        """Yield feature vectors of ``_ROWS`` rows at a time, and how many of them were asked for."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, accept_sparse="csr", dtype=(np.float64, np.float32))
        self.model_.eval()
        for block in blocks(X, _ROWS):
            rows = standardised(block, self.scaler_, self.device)
            yield self.model_.net(nn.functional.pad(rows, (0, 0, 0, _ROWS - len(rows)))), len(rows)

    # --- what scikit-learn asks ----------------------------------------------------------------------------------

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _check_parameters(self) -> None:
        """Refuse parameters that make no sense, when fitting: scikit-learn wants constructors that take anything."""
        find_head(self.head)
        for option in self.head_options or {}:
            if option in _RESERVED:
                raise InvalidValue(f"head_options cannot set {option!r}{_RESERVED[option]}")
        if isinstance(self.network, nn.Module):
            raise InvalidType(
                f"network is a {type(self.network).__name__}, which would be shared between clones: pass a function "
                "that takes the number of features and makes a new one"
            )
        if self.network is not None and not callable(self.network):
            raise InvalidType(f"network must be a function that makes a torch.nn.Module, got {self.network!r}")
        if self.batch_size != "auto":
            check_count("batch_size", _plain(self.batch_size))
        check_positive("learning_rate_init", _plain(self.learning_rate_init))
        check_weight("weight_decay", _plain(self.weight_decay))
        check_count("max_iter", _plain(self.max_iter))
        check_weight("tol", _plain(self.tol))
        check_count("n_iter_no_change", _plain(self.n_iter_no_change))
        check_probability("validation_fraction", _plain(self.validation_fraction))
        check_choice("mode", self.mode, MODES)
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise InvalidValue(f"torch cannot use device={self.device!r}: {reason}") from error


@contextlib.contextmanager
def _random_numbers(seed: int) -> Iterator[None]:
    """Seed torch, whose global generator weights, batches, masks and dropout use, and put it back afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _as_probabilities(probs: Tensor) -> NDArray[np.float64]:
    """Return float32 probabilities in float64, where they can sum to one to the last digit."""
    wide: NDArray[np.float64] = probs.double().numpy()
    wide /= wide.sum(1, keepdims=True)
    return wide


def _plain(value: Any) -> Any:
    """Return a NumPy number, such as a parameter grid holds, as Python's own."""
    return value.item() if isinstance(value, np.generic) else value
