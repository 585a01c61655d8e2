"""Small models to explore, the application behind a real server, bytes to send it, and what a refusal looks like."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image

from dropmax.lab.explorer import Explorer
from dropmax.workbench.data import Split
from dropmax.workbench.recipes import Recipe, load_recipe
from dropmax.workbench.training import TrainedModel, build

BYTES = {"content-type": "application/octet-stream"}
ADDRESSES = ["/", "/api/about", "/api/map", "/api/examples", "/api/examples/3", "/api/examples/3/noise"]


def make_explorer(
    *,
    head: str = "dropmax",
    classes: tuple[str, ...] = tuple("0123456789"),
    shape: tuple[int, ...] = (1, 28, 28),
    examples: int = 120,
    stored: int | None = None,
) -> Explorer:
    """An untrained model of random weights beside random test examples: what is measured does not matter here."""
    torch.manual_seed(3)
    recipe = load_recipe("mnist-1k")
    network = {"name": "mlp", "hidden": [16]} if len(shape) == 1 else {"name": "small-cnn", "widths": [4, 8]}
    if shape == (1, 28, 28):
        network = {"name": "tutorial-cnn", "hidden": 32}
    recipe = Recipe(recipe.data, network, {"name": head}, recipe.training)
    model = build(recipe, shape, len(classes)).eval()
    generator = torch.Generator().manual_seed(5)
    labels = torch.arange(examples) % len(classes)
    side = stored or (shape[-1] if len(shape) == 3 else 0)
    if len(shape) == 3:
        inputs = torch.randint(0, 256, (examples, shape[0], side, side), dtype=torch.uint8, generator=generator)
    else:
        inputs = torch.randn(examples, *shape, generator=generator)
    width = shape[0]
    trained = TrainedModel(model, recipe, classes, shape, (0.2,) * width, (0.4,) * width, side)
    crop = shape[-1] if len(shape) == 3 and side != shape[-1] else None
    return Explorer(trained, Split(inputs, labels, crop), "a-run")


@contextmanager
def running(app: Any) -> Iterator[tuple[str, int]]:
    """The application behind the real server, on a thread; yields its address."""
    from dropmax.lab.explorer import server

    bound = server.bind("127.0.0.1", 0)
    bound.listen()
    one = server.make_server(app)
    thread = threading.Thread(target=one.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        yield bound.getsockname()[:2]
    finally:
        one.should_exit = True
        thread.join(10)
        bound.close()
        assert not thread.is_alive()


def talk(place: tuple[str, int], *pieces: bytes, seconds: float = 10) -> bytes:
    """Send raw bytes and return everything that comes back until the server closes."""
    with socket.create_connection(place, timeout=seconds) as connection:
        for piece in pieces:
            connection.sendall(piece)
        answer = b""
        try:
            while chunk := connection.recv(65536):
                answer += chunk
        except ConnectionResetError:
            pass
        return answer


def drawing() -> np.ndarray:
    """A slanted stroke on the canvas."""
    ink = np.zeros((280, 280), np.uint8)
    for k in range(180):
        ink[50 + k, 90 + k // 3 : 112 + k // 3] = 255
    return ink


def picture(form: str = "PNG", size: tuple[int, int] = (60, 80)) -> bytes:
    image = Image.new("L", size, 255)
    image.paste(0, (size[0] // 2 - 4, 10, size[0] // 2 + 4, size[1] - 10))
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


def refused(response: Any, status: int, words: str = "") -> None:
    """Every refusal is JSON with one sentence, and strict headers; never a traceback."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert list(response.json()) == ["error"]
    sentence = response.json()["error"]
    assert words in sentence
    assert "Traceback" not in sentence
    assert sentence[-1] == "."
