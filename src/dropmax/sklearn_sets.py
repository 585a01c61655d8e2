"""What the scikit-learn estimator says beside labels: calibrated probabilities and prediction sets, as MAPIE does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted, column_or_1d
from torch import Tensor

from dropmax.calibration import Calibration
from dropmax.checks import check_count
from dropmax.classifier import Classifier
from dropmax.errors import InvalidType, InvalidValue
from dropmax.sklearn_rows import check_known
from dropmax.workbench.evaluation import Outputs, calibrate_head

__all__ = ["ConformalMixin"]

_ROWS = 1024  # feature vectors that are answered at a time


class ConformalMixin:
    """``conformalize``, ``predict_set`` and ``confusable_with`` of :class:`dropmax.sklearn.DropMaxClassifier`."""

    classes_: NDArray[Any]
    model_: Classifier

    def _outputs(self, X: Any, mode: str | None = None, samples: int = 100) -> Outputs:
        raise NotImplementedError

    def _features(self, X: Any) -> Iterator[tuple[Tensor, int]]:
        raise NotImplementedError

    @property
    def calibration_(self) -> Calibration | None:
        """What :meth:`conformalize` found; None before."""
        check_is_fitted(self)
        return self.model_.head.calibration

    def conformalize(self, X: Any, y: Any) -> Any:
        """Calibrate on rows that did not train the model: temperatures, and scores for prediction sets.

        Afterwards ``predict_proba(X, calibrated=True)`` uses the temperature of the mode (mean or exact) whose log loss
        on these rows is lowest, and :meth:`predict_set` has its thresholds. Both use the same rows; one fitted number
        moves the coverage far less than the choice of rows does. Fitting again forgets it.
        """
        check_is_fitted(self)
        y = column_or_1d(y, dtype=None)
        check_known(np.unique(y).tolist(), self.classes_)
        features = torch.cat([rows[:count] for rows, count in self._features(X)])
        if len(features) != len(y):
            raise InvalidValue(f"X has {len(features)} rows, but y has {len(y)} labels")
        labels = torch.from_numpy(np.searchsorted(self.classes_, y))
        batches = zip(torch.split(features, _ROWS), torch.split(labels, _ROWS), strict=True)
        calibrate_head(self.model_.head, batches, source="rows given to conformalize")
        return self

    def predict_set(
        self, X: Any, *, coverage: float | Sequence[float] = 0.95
    ) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the labels, and which classes each row could be: boolean ``(n, n_classes, n_coverages)``.

        The shapes are those of MAPIE's ``predict_set``. A set (LAC, of calibrated probabilities) holds the true class
        with probability ``coverage`` if the row comes from the same source as those of :meth:`conformalize`. It is
        empty where no class is likely enough.

        >>> from sklearn.datasets import load_wine
        >>> from dropmax.sklearn import DropMaxClassifier
        >>> X, y = load_wine(return_X_y=True)
        >>> model = DropMaxClassifier(random_state=0, max_iter=20, tol=0.0).fit(X[::2], y[::2])
        >>> labels, sets = model.conformalize(X[1::2], y[1::2]).predict_set(X[:3], coverage=[0.9, 0.95])
        >>> labels.shape, sets.shape
        ((3,), (3, 3, 2))
        """
        calibration = self._calibrated()
        coverages = [coverage] if isinstance(coverage, (int, float)) else coverage
        if isinstance(coverages, str) or not isinstance(coverages, Sequence) or not coverages:
            raise InvalidType(f"coverage must be a number such as 0.95, or a list of them, got {coverage!r}")
        outputs = self._outputs(X)
        sets = torch.stack([calibration.sets(outputs.probs, each) for each in coverages], dim=-1)
        return self.classes_[outputs.predicted.numpy()], sets.numpy()

    def confusable_with(self, X: Any, *, coverage: float | None = None, limit: int | None = None) -> list[list[Any]]:
        """Return, for each row, the other labels it could be, most probable first; none where the model is sure.

        These are the labels of its prediction set but the predicted one, at most ``limit`` of them. After
        :meth:`conformalize` the set has a ``coverage``; before, it is the fewest labels with a probability of 0.95
        together, which promises nothing. See :meth:`dropmax.workbench.evaluation.Outputs.sets`.
        """
        check_is_fitted(self)
        if coverage is not None:
            self._calibrated()
        if limit is not None:
            check_count("limit", limit)
        labels = self.classes_.tolist()
        rivals = self._outputs(X).confusable(coverage=coverage, limit=limit)
        return [[labels[k] for k in row] for row in rivals]

    def _calibrated(self) -> Calibration:
        calibration = self.calibration_
        if calibration is None:
            raise InvalidValue(
                "this estimator has not been calibrated: call conformalize(X, y) with rows that did not train it first"
            )
        return calibration
