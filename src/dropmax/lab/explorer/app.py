"""The explorer's addresses: what each takes, within which bounds, and what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Annotated, Any, Literal

import numpy as np
import torch
from fastapi import FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from dropmax.errors import DataError, DropMaxError
from dropmax.lab import images
from dropmax.lab.explorer.guard import Guard, Uploads, polite
from dropmax.lab.explorer.model import SENTENCE, Explorer, shown_name
from dropmax.workbench.data.mnist import as_mnist

__all__ = ["create_app"]

CANVAS = 280  #: side of the drawing the page sends, one byte per pixel
MOST_TEXT = 100_000  #: bytes of a sentence
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_NO_NUMBER = 2**31 - 1

Seed = Annotated[int, Query(ge=0, le=_NO_NUMBER)]
Index = Annotated[int, Path(ge=0, le=_NO_NUMBER)]
Class = Annotated[int | None, Query(ge=0, le=_NO_NUMBER)]


def create_app(explorer: Explorer, bound: str = "127.0.0.1", *, uploads: Uploads | None = None) -> FastAPI:
    """Return the ASGI application that shows one run on a server bound to the address ``bound``.

    The files of the page are read once, here: no part of a request ever becomes a path.
    """
    worker = Worker()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        worker.close()

    # No page of documentation: FastAPI's would load scripts from elsewhere.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=lifespan)
    app.add_middleware(Guard, bound=bound)
    app.add_exception_handler(HTTPException, _on_refusal)
    app.add_exception_handler(RequestValidationError, _on_bad_number)
    app.add_exception_handler(DropMaxError, _on_our_error)
    _add_page(app)
    _add_examples(app, explorer, worker)
    _add_tryout(app, explorer, worker, uploads or Uploads())
    return app


def _add_page(app: FastAPI) -> None:
    """The files of the page."""
    site = {
        file.name: (file.read_bytes(), _KINDS[file.name[file.name.rindex(".") :]])
        for file in files("dropmax.lab.explorer").joinpath("static").iterdir()
        if file.name.endswith(tuple(_KINDS))
    }

    @app.get("/")
    async def home() -> Response:
        return await static("index.html")

    @app.get("/static/{name}")
    async def static(name: str) -> Response:
        if name not in site:
            raise HTTPException(404)
        content, kind = site[name]
        return Response(content, media_type=kind, headers={"cache-control": "no-cache"})


def _add_examples(app: FastAPI, explorer: Explorer, worker: Worker) -> None:
    """The run, the map of its classes, and its examples."""
    # These two never change while the server runs.
    about, class_map = JSONResponse(explorer.about()), JSONResponse(explorer.map())

    def check_index(index: int) -> None:
        if index >= (count := len(explorer.test)):
            raise HTTPException(404, f"There are {count:,} examples, counted from 0; this is none of them.")

    @app.get("/api/about")
    async def get_about() -> Response:
        return about

    @app.get("/api/map")
    async def get_map() -> Response:
        return class_map

    @app.get("/api/examples")
    async def get_examples(
        true: Class = None,
        predicted: Class = None,
        rival: Class = None,
        order: Literal["closest", "hardest", "easiest", "attention", "differ"] = "closest",
        page: Annotated[int, Query(ge=1, le=_NO_NUMBER)] = 1,
    ) -> Response:
        chosen = {"true": true, "predicted": predicted, "rival": rival}
        for name, k in chosen.items():
            if k is not None and k >= len(explorer.classes):
                raise HTTPException(422, f"{name} must be a class from 0 to {len(explorer.classes) - 1}.")
        if order == "attention" and rival is None:
            raise HTTPException(422, "To sort by attention, say to which class, as rival.")
        if order == "differ" and explorer.beside is None:
            raise HTTPException(422, "Only two runs can differ: start the explorer with a second one.")
        return await worker.answer(explorer.examples, **chosen, order=order, page=page)

    @app.get("/api/examples/{index}")
    async def get_example(
        index: Index, noise: Annotated[float, Query(ge=0, le=1, allow_inf_nan=False)] = 0.0, seed: Seed = 0
    ) -> Response:
        check_index(index)
        return await worker.answer(explorer.example, index, noise=noise, seed=seed)

    @app.get("/api/examples/{index}/noise")
    async def get_noise(index: Index, seed: Seed = 0) -> Response:
        check_index(index)
        return await worker.answer(explorer.noise, index, seed=seed)


def _add_tryout(app: FastAPI, explorer: Explorer, worker: Worker, uploads: Uploads) -> None:
    """Drawings, images and sentences of the visitor's own."""

    @app.post("/api/try/text")
    async def try_text(request: Request, seed: Seed = 0) -> Response:
        _check_kind(request)
        if explorer.originals.kind != "text":
            raise HTTPException(409, "This model does not take sentences.")
        async with uploads.body(request, MOST_TEXT) as content:
            return await worker.answer(_typed, explorer, content, seed)

    @app.post("/api/try/drawing")
    async def try_drawing(request: Request, seed: Seed = 0) -> Response:
        _check_kind(request)
        if not explorer.takes_drawings:
            raise HTTPException(409, "This model does not take drawings: its inputs are not 28 x 28 grey images.")
        async with uploads.body(request, CANVAS**2) as content:
            if len(content) != CANVAS**2:
                raise HTTPException(422, f"A drawing is {CANVAS} x {CANVAS} bytes, one per pixel.")
            return await worker.answer(_drawn, explorer, content, seed)

    @app.post("/api/try/image")
    async def try_image(request: Request, prepare: Literal["mnist", "none"] = "none", seed: Seed = 0) -> Response:
        _check_kind(request)
        if not explorer.takes_images:
            raise HTTPException(409, "This model does not take images: its inputs are features.")
        if prepare == "mnist" and not explorer.takes_drawings:
            raise HTTPException(409, "Only models of 28 x 28 grey images take an image prepared like MNIST.")
        async with uploads.body(request, images.MOST_BYTES) as content:
            if not content:
                raise HTTPException(422, "The file is empty.")
            return await worker.answer(_uploaded, explorer, content, prepare, seed)


class Worker:
    """Runs the model on a few threads of its own, and turns away more than it could do in time.

    Two threads: one request cannot make all others wait, and no more than two images are ever being decoded.
    """

    def __init__(self, threads: int = 2, most_waiting: int = 128) -> None:
        self._pool = ThreadPoolExecutor(threads, "explorer")
        self.most_waiting = most_waiting
        self.waiting = 0

    async def answer(self, function: Callable[..., dict[str, Any]], *values: Any, **named: Any) -> Response:
        """Call the function on a thread and return its answer as JSON."""
        if self.waiting >= self.most_waiting:
            raise HTTPException(503, "The explorer is busy: please try again in a moment.", {"retry-after": "1"})
        self.waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return JSONResponse(await loop.run_in_executor(self._pool, partial(function, *values, **named)))
        finally:
            self.waiting -= 1

    def close(self) -> None:
        """Drop what waits, and end the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _drawn(explorer: Explorer, content: bytes, seed: int) -> dict[str, Any]:
    digit = as_mnist(np.frombuffer(content, np.uint8).reshape(CANVAS, CANVAS))
    return explorer.both(torch.from_numpy(digit)[None], seed=seed)


def _uploaded(explorer: Explorer, content: bytes, prepare: str, seed: int) -> dict[str, Any]:
    with images.open_upload(content) as image:
        if explorer.originals.kind == "images":
            backbone = explorer.originals.backbone
            pixels = images.as_trained(image, (3, backbone.image_size, backbone.image_size), backbone.stored_size)
            return explorer.both(backbone(pixels[None])[0], seed=seed) | {"image": images.png(pixels)}
        if prepare == "mnist":
            inputs = images.as_digit(image)
        else:
            inputs = images.as_trained(image, explorer.trained.input_shape, explorer.trained.stored_size)
    return explorer.both(inputs, seed=seed)


def _typed(explorer: Explorer, content: bytes, seed: int) -> dict[str, Any]:
    text = content.decode("utf-8", errors="replace")
    if not text.strip():
        raise DataError("there is nothing in the text")
    return explorer.both(explorer.originals.backbone([text])[0], seed=seed) | {"text": shown_name(text, most=SENTENCE)}


def _check_kind(request: Request) -> None:
    """Refuse the kinds of body that a form of another site could send without asking first."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/octet-stream" and not kind.startswith("image/"):
        raise HTTPException(415, "Send the bytes as application/octet-stream or as an image.", {"connection": "close"})


async def _on_refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    ours = {
        "Not Found": "There is nothing here.",
        "Method Not Allowed": "This address does not take that kind of request.",
    }
    return polite(error.status_code, ours.get(error.detail, error.detail), **(error.headers or {}))


async def _on_bad_number(_: Request, error: Exception) -> Response:
    # The names are ours; what was sent is not repeated.
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name, message = str(first["loc"][-1]), str(first["msg"])
    return polite(422, f"{name} was not accepted: {message[0].lower()}{message[1:]}.")


async def _on_our_error(_: Request, error: Exception) -> Response:
    sentence = " ".join(str(error).split())
    return polite(422, f"{sentence[0].upper()}{sentence[1:]}.")
