"""One small model for most tests, and a client that speaks to the application without a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dropmax.lab.explorer import Explorer
from tests.lab.explorer.small import make_explorer


@pytest.fixture(scope="session")
def explorer() -> Explorer:
    return make_explorer()


@pytest.fixture(scope="session")
def make_client() -> Callable[..., Any]:
    pytest.importorskip("fastapi", reason="needs FastAPI (the extra `explore`)")
    from starlette.testclient import TestClient

    from dropmax.lab.explorer.app import create_app

    def make(explorer: Explorer, bound: str = "127.0.0.1", **options: Any) -> TestClient:
        app = create_app(explorer, bound, **options)
        return TestClient(app, base_url="http://127.0.0.1:8765", raise_server_exceptions=False)

    return make


@pytest.fixture(scope="session")
def client(explorer: Explorer, make_client: Callable[..., Any]) -> Any:
    return make_client(explorer)
