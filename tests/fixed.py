"""A scikit-learn classifier whose inputs are its predicted probabilities, for scikit-learn and MAPIE to calibrate."""

from __future__ import annotations

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin


class Fixed(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    def fit(self, X: np.ndarray, y: np.ndarray) -> Fixed:
        self.classes_ = np.arange(X.shape[1])
        self.fitted_ = True
        return self

    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        return X

    def predict(self, X: np.ndarray) -> np.ndarray:
        return X.argmax(1)
