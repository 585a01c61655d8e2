"""The flowers every test of the estimator knows, on one thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def iris() -> tuple[Any, Any]:
    pytest.importorskip("sklearn", reason="needs scikit-learn (the extra `sklearn`)")
    from sklearn.datasets import load_iris

    data = load_iris()
    return data.data, data.target_names[data.target]
