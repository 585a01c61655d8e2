"""Attacks by names: terminal escapes where lines are printed, HTML where pages are made."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from PIL import Image

from dropmax.lab.figures.registry import make_figures
from dropmax.lab.figures.runs import load_runs
from dropmax.lab.report import make_report
from dropmax.workbench.hub import save_pretrained
from dropmax.workbench.recipes import load_recipe
from dropmax.workbench.training import train
from tests.slow.hostile import Attack, Ground, command

__all__ = ["attacks"]

#: Sets a window's title, clears the screen, writes backwards, begins a line of its own, and speaks rich's markup.
ESCAPES = {
    "a terminal escape": "\x1b]0;pwned\x07",
    "a cleared screen": "\x1b[2J\x1b[H",
    "an 8-bit escape": "\x9b31m",
    "text that turns round": "\u202egnp.\u2066",
    "a line of its own": "a\ndropmax: all is well",
    "a carriage return": "x\rdropmax: all is well",
    "rich markup": "[/red][link=file:///etc]x[/link][",
    "bytes that are no text": "\udcff\udcfe",
}
HTML = {
    "a script": '<script>document.title="pwned"</script>',
    "an event": '"><img src=x onerror=document.title="pwned">',
    "the end of a style": "</style></title></svg><script>1</script>",
    "a link": '<a href="javascript:document.title=1">wren</a>',
    "Markdown": "`](javascript:1) | <b onclick=x>\n## evil",
    "a template": "${7*7}{{7*7}}<%= 7*7 %>",
    "an entity": "&lt;script&gt;&#60;script&#62;",
    "a comment": "<!--><svg/onload=x>-->",
}


def attacks(short: bool) -> dict[str, Attack]:
    """Return the attacks of this file; in the short form with the first two names of each sort."""
    few = 2 if short else None
    found: dict[str, Attack] = {}
    for what, name in list(ESCAPES.items())[:few]:
        for place, attack in _PRINTED.items():
            found[f"{what} in {place}"] = partial(attack, name)
    for what, name in list(HTML.items())[:few]:
        found[f"{what} as the name of a class"] = partial(_pages, name)
    return found


# --- terminals --------------------------------------------------------------------------------------------------


def _see(code: int, said: str, expected: int, name: str, terminal: bool) -> None:
    """Raise where something was printed that a terminal obeys; rich's own colours are allowed on a terminal."""
    if code != expected:
        pytest.fail(f"exit code {code}: {said[-300:]!r}")
    if "Traceback" in said:
        pytest.fail("a traceback was printed")
    left = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said) if terminal else said
    for bad in ("\x1b]0;pwned", "\x1b[2J", "\x9b", "\u202e", "\u2066", "\udcff"):
        if bad in said:
            pytest.fail(f"{bad!r} was printed raw")
    if (
        "\x1b" in left
        or "\x07" in left
        or re.search(r"^dropmax: all is well", left.replace("\r\n", "\n"), re.MULTILINE)
    ):
        pytest.fail(f"printed raw: {left[-300:]!r}")
    if "\r" in left and not terminal:
        pytest.fail("a carriage return was printed raw")


def _place(ground: Ground, name: str, ending: str) -> Path:
    return ground.folder / (name.replace("/", "_") + ending)


def _bad_table(name: str, ground: Ground) -> str:
    """Train on a table that cannot be read."""
    path = _place(ground, name, ".csv")
    path.write_text("a,label\nx,y\n")
    for terminal in (False, True):
        _see(*command("train", path, terminal=terminal), 2, name, terminal)
    _see(*command("data", "check", path), 1, name, False)
    return "neutralised"


def _bad_column(name: str, ground: Ground) -> str:
    path = ground.folder / "a.csv"
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace").replace('"', "'")
    path.write_text(f'"{text}",label\n"{text}",y\n1,z\n', encoding="utf-8")
    _see(*command("train", path), 2, name, False)
    return "neutralised"


def _missing_run(name: str, ground: Ground) -> str:
    for words in (["evaluate"], ["report"], ["train", "--resume"], ["explore"]):
        _see(*command(*words, _place(ground, name, "")), 2, name, False)
    return "neutralised"


def _image_files(name: str, ground: Ground) -> str:
    """Predict images of that name with a model whose classes and data have it too, in every format."""
    run = _model(ground, _text(name))
    folder = ground.folder / "images"
    folder.mkdir()
    path = folder / (name.replace("/", "_") + ".png")
    Image.new("L", (28, 28)).save(path)
    for terminal in (False, True):
        _see(*command("predict", run, folder, terminal=terminal), 0, name, terminal)
    _see(*command("predict", run, folder, "--format", "json", terminal=True), 0, name, True)
    _see(*command("predict", run, folder, "--format", "csv", terminal=True), 0, name, True)
    code, said = command("predict", run, folder, "--format", "json")
    if code or not json.loads(said)[0]["input"].startswith(str(folder)):
        pytest.fail(f"the JSON for scripts cannot be read: {said[-300:]!r}")
    path.write_bytes(b"no image")
    _see(*command("predict", run, folder), 2, name, False)
    return "neutralised"


def _model_file(name: str, ground: Ground) -> str:
    """Hand over a model whose recipe names data like that, which is then not found."""
    run = _model(ground, _text(name))
    for words in (["evaluate"], ["explore", "--port", "0"]):
        _see(*command(*words, run), 2, name, False)
    return "neutralised"


def _image_classes(name: str, ground: Ground) -> str:
    """Learn from a folder of images where a class and a file have that name, on a terminal."""
    for label in ("wren", name.replace("/", "_")):
        (ground.folder / "set" / label).mkdir(parents=True)
        for k in range(6):
            Image.new("RGB", (12, 12), (40 * k, 0, 0)).save(ground.folder / "set" / label / f"{k}{label[:40]}.png")
    out = ground.folder / "run"
    settings = ["network.name=mlp", "network.hidden=[4]", "training.batch_size=4", "data.image_size=8"]
    words = [word for setting in settings for word in ("--set", setting)]
    code, said = command("train", ground.folder / "set", "--out", out, "--epochs", 1, *words, terminal=True)
    is_text = _text(name) == name
    _see(code, said, 0 if is_text else 2, name, True)
    if is_text:
        _see(*command("evaluate", out, terminal=True), 0, name, True)
    return "neutralised" if is_text else "refused"


def _text(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _model(ground: Ground, name: str) -> Path:
    """Write a model of random weights with classes of that name."""
    from dropmax.workbench.training import build

    recipe = load_recipe("mnist-1k").override(
        {"network.name": "mlp", "network.hidden": [4], "data.name": f"{ground.folder}/{name}.npz"}
    )
    state = {key: value.contiguous() for key, value in build(recipe, (1, 28, 28), 3).state_dict().items()}
    about: dict[str, Any] = {
        "recipe": recipe.to_dict(),
        "classes": [name, f"{name} 2", "wren"],
        "input_shape": [1, 28, 28],
    }
    about |= {"stored_size": 28, "mean": [0.1], "std": [0.3]}
    path = ground.folder / "model.safetensors"
    path.write_bytes(safetensors.torch.save(state, metadata={"dropmax": json.dumps(about)}))
    return path


_PRINTED: dict[str, Callable[[str, Ground], str]] = {
    "the name of a table": _bad_table,
    "the names of columns and cells": _bad_column,
    "the name of a run": _missing_run,
    "the names of images and classes": _image_files,
    "the data a model names": _model_file,
    "the name of a folder of images": _image_classes,
}


# --- pages ------------------------------------------------------------------------------------------------------


class _Page(html.parser.HTMLParser):
    """Notes what a browser would run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.live: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look for scripts, events and addresses that are code."""
        if tag in ("script", "iframe", "object", "embed", "form", "base", "link"):
            self.live.append(tag)
        for key, value in attrs:
            address = re.sub(r"\s", "", value or "").lower()
            if key.startswith("on") or address.startswith(("javascript:", "http:", "https:", "file:", "//")):
                self.live.append(f"{tag} {key}={value}")


def _pages(name: str, ground: Ground) -> str:
    """Make every page and picture there is of a run whose classes and data have that name."""
    path = ground.folder / "a.npz"
    labels = np.arange(60) % 3
    pixels = np.random.default_rng(0).integers(0, 256, (60, 8, 8)).astype(np.uint8)
    np.savez(path, x=pixels, y=labels, classes=np.array([name, f"2 {name}", "wren"]))
    named = ground.folder / (name.replace("/", "_") + ".npz")
    shutil.move(path, named)
    recipe = load_recipe("own-features").override(
        {"data.name": str(named), "network.hidden": [4], "training.epochs": 1, "training.batch_size": 16}
    )
    run = train(recipe, ground.folder / "run", quiet=True).path
    loaded = load_runs([run])
    live = _Page(make_report(loaded, f"dropmax report {name}")).live
    for made in make_figures(loaded, ground.folder / "figures", only=["confusable"], formats=["svg"], command=name):
        for file in made.files:
            live += [what for what in _Page(file.read_text()).live if not what.startswith(("link", "metadata"))]
    card = (save_pretrained(run, ground.folder / "card") / "README.md").read_text()
    body = re.sub(r"```.*?```", "", card.split("---", 2)[2], flags=re.DOTALL)
    live += _Page(re.sub(r"`[^`\n]*`", "", body)).live
    if live:
        pytest.fail(f"a browser would obey {live[:3]}")
    _explore(run, name)
    return "neutralised"


def _explore(run: Path, name: str) -> None:
    """Ask the explorer for everything; names may only leave as JSON that no browser takes for a page."""
    from starlette.testclient import TestClient

    from dropmax.lab.explorer import Explorer
    from dropmax.lab.explorer.app import create_app

    torch.set_num_threads(1)
    client = TestClient(create_app(Explorer.open(run)), base_url="http://127.0.0.1:8765", raise_server_exceptions=False)
    for address in ("/", "/api/about", "/api/map", "/api/examples", "/api/examples/3", f"/api/{name}", f"/{name}"):
        answer = client.get(address)
        kind = answer.headers["content-type"].partition(";")[0]
        if answer.status_code >= 500 or answer.headers["x-content-type-options"] != "nosniff":
            pytest.fail(f"{address!r} was answered with {answer.status_code}")
        if "script-src 'self'" not in answer.headers["content-security-policy"]:
            pytest.fail(f"{address!r} was answered without a policy")
        if kind != "application/json" and any(part in answer.text for part in (name, html.escape(name))):
            pytest.fail(f"{address!r} gave the name as {kind}")
