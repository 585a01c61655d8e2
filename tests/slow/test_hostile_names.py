"""Names from strangers: no terminal escape is printed raw, and no HTML reaches a page as HTML."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import torch
from PIL import Image

from dropmax.lab.explorer import Explorer
from dropmax.lab.figures.registry import make_figures
from dropmax.lab.figures.runs import load_runs
from dropmax.lab.report import make_report
from dropmax.workbench.hub import save_pretrained
from dropmax.workbench.recipes import load_recipe
from dropmax.workbench.training import build, train
from tests.command import ROUNDS
from tests.slow.hostile import command, write_model

FEW = 2 if ROUNDS == 1 else None
#: They set a window's title, clear the screen, write backwards, begin a line of their own, and speak rich's markup.
ESCAPES = [
    "\x1b]0;pwned\x07", "\x1b[2J\x1b[H", "\x9b31m", "\u202egnp.\u2066", "a\ndropmax: all is well",
    "x\rdropmax: all is well", "[/red][link=file:///etc]x[/link][", "\udcff\udcfe",  # the last: bytes that are not text
][:FEW]  # fmt: skip
HTML = [
    '<script>document.title="pwned"</script>',
    '"><img src=x onerror=document.title="pwned">',
    "</style></title></svg><script>1</script>",
    '<a href="javascript:document.title=1">wren</a>',
    "`](javascript:1) | <b onclick=x>\n## evil",
    "${7*7}{{7*7}}<%= 7*7 %>",
    "&lt;script&gt;&#60;script&#62;",
    "<!--><svg/onload=x>-->",
][:FEW]


# --- terminals --------------------------------------------------------------------------------------------------


def see(expected: int, *arguments: object, terminal: bool = False) -> str:
    """Run the command, and fail where it prints what a terminal obeys; rich's own colours are allowed on one."""
    code, said = command(*arguments, terminal=terminal)
    assert code == expected, said[-300:]
    assert "Traceback" not in said
    assert not re.search("\x1b]0;pwned|\x1b\\[2J|[\x9b\u202e\u2066\udcff]", said)
    left = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said) if terminal else said
    assert not re.search("[\x1b\x07]|^dropmax: all is well", left.replace("\r\n", "\n"), re.MULTILINE), left[-300:]
    assert terminal or "\r" not in left
    return said


def text_of(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


@pytest.fixture(params=ESCAPES, ids=ascii)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(name: str, tmp_path: Path) -> Path:
    """A model of random weights with classes and data of that name."""
    values = {"network.name": "mlp", "network.hidden": [4], "data.name": f"{tmp_path}/{text_of(name)}.npz"}
    recipe = load_recipe("mnist-1k").override(values)
    state, classes = build(recipe, (1, 28, 28), 3).state_dict(), [text_of(name), f"{text_of(name)} 2", "wren"]
    return write_model(tmp_path / "model.safetensors", recipe, state, classes, [1, 28, 28])


def test_names_of_tables_columns_and_runs(name: str, tmp_path: Path) -> None:
    path = tmp_path / (name.replace("/", "_") + ".csv")
    path.write_text("a,label\nx,y\n")
    for terminal in (False, True):
        see(2, "train", path, terminal=terminal)
    see(1, "data", "check", path)
    cell = text_of(name).replace('"', "'")
    (tmp_path / "a.csv").write_text(f'"{cell}",label\n"{cell}",y\n1,z\n', encoding="utf-8")
    see(2, "train", tmp_path / "a.csv")
    for words in (["evaluate"], ["report"], ["train", "--resume"], ["explore"]):
        see(2, *words, tmp_path / name.replace("/", "_"))


def test_names_of_images_and_classes(name: str, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    path = folder / (name.replace("/", "_") + ".png")
    Image.new("L", (28, 28)).save(path)
    see(0, "predict", model, folder)
    for kind in ("table", "json", "csv"):
        see(0, "predict", model, folder, "--format", kind, terminal=True)
    assert json.loads(see(0, "predict", model, folder, "--format", "json"))[0]["input"].startswith(str(folder))
    path.write_bytes(b"no image")
    see(2, "predict", model, folder)
    see(2, "evaluate", model)  # its data has such a name, too, and is not there
    see(2, "explore", "--port", "0", model)


def test_a_folder_of_images_with_such_a_class(name: str, tmp_path: Path) -> None:
    for label in ("wren", name.replace("/", "_")):
        (tmp_path / "set" / label).mkdir(parents=True)
        for k in range(6):
            Image.new("RGB", (12, 12), (40 * k, 0, 0)).save(tmp_path / "set" / label / f"{k}{label[:40]}.png")
    settings = ["network.name=mlp", "network.hidden=[4]", "training.batch_size=4", "data.image_size=8"]
    words = [word for setting in settings for word in ("--set", setting)]
    is_text = text_of(name) == name
    out = tmp_path / "run"
    see(0 if is_text else 2, "train", tmp_path / "set", "--out", out, "--epochs", 1, *words, terminal=True)
    if is_text:
        see(0, "evaluate", out, terminal=True)


# --- pages ------------------------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
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
            is_code = address.startswith(("javascript:", "http:", "https:", "file:", "//"))
            if key.startswith("on") or (is_code and not key.startswith(("xmlns", "rdf:"))):  # names, not addresses
                self.live.append(f"{tag} {key}={value}")


@pytest.mark.parametrize("name", HTML)
def test_html_as_the_name_of_a_class_and_of_data(name: str, tmp_path: Path) -> None:
    data = tmp_path / (name.replace("/", "_") + ".npz")
    pixels = np.random.default_rng(0).integers(0, 256, (60, 8, 8)).astype(np.uint8)
    with data.open("wb") as stream:
        np.savez(stream, x=pixels, y=np.arange(60) % 3, classes=np.array([name, f"2 {name}", "wren"]))
    values = {"data.name": str(data), "network.hidden": [4], "training.epochs": 1, "training.batch_size": 16}
    run = train(load_recipe("own-features").override(values), tmp_path / "run", quiet=True).path
    loaded = load_runs([run])
    live = Page(make_report(loaded, f"dropmax report {name}")).live
    for made in make_figures(loaded, tmp_path / "figures", only=["confusion-graph"], formats=["svg"], command=name):
        for file in made.files:
            live += Page(file.read_text()).live
    card = (save_pretrained(run, tmp_path / "card") / "README.md").read_text()
    body = re.sub(r"```.*?```", "", card.split("---", 2)[2], flags=re.DOTALL)
    live += Page(re.sub(r"`[^`\n]*`", "", body)).live
    assert live == [], "a browser would obey"
    explore(run, name)


def explore(run: Path, name: str) -> None:
    """Ask the explorer for everything; names may only leave as JSON that no browser takes for a page."""
    from starlette.testclient import TestClient

    from dropmax.lab.explorer.app import create_app

    torch.set_num_threads(1)
    client = TestClient(create_app(Explorer.open(run)), base_url="http://127.0.0.1:8765", raise_server_exceptions=False)
    pages = ("", "api/about", "api/map", "api/examples", "api/examples/3", f"api/{quote(name)}", quote(name))
    for address in pages:
        answer = client.get(f"/{address}")
        assert answer.status_code < 500
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        if not answer.headers["content-type"].startswith("application/json"):
            assert name not in answer.text
            assert html.escape(name) not in answer.text


def test_what_a_browser_would_run_is_noticed() -> None:
    page = Page("<p onclick=x><a href=' java\nscript:1'>x</a><img src='data:image/png'></p><script></script>")
    assert page.live == ["p onclick=x", "a href= java\nscript:1", "script"]
