"""The page in a real browser: draw, drop, click through the map, walk by keys; look at it large, small, dark, light."""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

pytest.importorskip("fastapi", reason="needs FastAPI (the extra `explore`)")
pytest.importorskip("aiohttp", reason="needs aiohttp, to speak with Chromium")
from tests.lab.explorer.cdp import Browser, chromium

if chromium() is None:
    pytest.skip("needs Chromium (apt-get install chromium)", allow_module_level=True)

from dropmax import Classifier, DropMax
from dropmax.lab import images
from dropmax.lab.explorer import Explorer
from dropmax.lab.explorer.app import create_app
from dropmax.workbench.data import Split, load
from dropmax.workbench.recipes import load_recipe
from dropmax.workbench.training import TrainedModel
from tests.lab.explorer.small import make_explorer, running

SEVEN = [[(0.3, 0.2), (0.7, 0.2), (0.62, 0.4), (0.55, 0.6), (0.45, 0.85)]]
ONE = [[(0.5, 0.15), (0.5, 0.5), (0.5, 0.85)]]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    one = Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def trained() -> Explorer:
    """A model that knows a one from a seven without being trained: ridge regression of 5,000 digits on their pixels."""
    data = load("mnist-5k")
    model = Classifier(nn.Flatten(), DropMax(784, 10)).eval()
    recipe = load_recipe("mnist-5k")
    known = TrainedModel(model, recipe, data.classes, (1, 28, 28), data.mean, data.std, 28)
    x = known.prepare(data.train.inputs).flatten(1)
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    wanted = nn.functional.one_hot(data.train.labels, 10).float()
    weights = torch.linalg.solve(x.T @ x + 2000 * torch.eye(785), x.T @ wanted).T
    with torch.no_grad():
        for layer, scale, shift in ((model.head.classifier, 12.0, 0.0), (model.head.retain, 6.0, -1.5)):
            layer.weight.copy_(scale * weights[:, :-1])
            layer.bias.copy_(scale * weights[:, -1] + shift)
    return Explorer(known, Split(data.test.inputs[:1500], data.test.labels[:1500]), "ridge")


@pytest.fixture(scope="module")
def url(trained: Explorer) -> Iterator[str]:
    with running(create_app(trained)) as (host, port):
        yield f"http://{host}:{port}/"


@pytest.fixture(autouse=True)
def _nothing_goes_wrong(browser: Browser) -> Iterator[None]:
    """No test may leave an exception, a refused resource or a broken rule of the content policy behind."""
    browser.problems.clear()
    browser.requests.clear()
    browser.look(1280, 900)
    yield
    # A refusal that a test asks for is logged by the browser too, as a failed resource.
    expected = "the server responded with a status of 4"
    assert [problem for problem in browser.problems if expected not in problem] == []


def draw(browser: Browser, strokes: list[list[tuple[float, float]]]) -> None:
    x, y, side = browser.js(
        "(() => { const e = document.getElementById('pad'); e.scrollIntoView({block: 'center', behavior: 'instant'});"
        " const b = e.getBoundingClientRect(); return [b.x, b.y, b.width]; })()"
    )
    for stroke in strokes:
        points = [(x + across * side, y + down * side) for across, down in stroke]
        browser.mouse("mousePressed", *points[0])
        for point in points[1:]:
            browser.mouse("mouseMoved", *point)
        browser.mouse("mouseReleased", *points[-1])


def focused(browser: Browser) -> str:
    return str(browser.js("document.activeElement.id || document.activeElement.className"))


# --- try your own ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strokes", "digit"), [(SEVEN, "7"), (ONE, "1")])
def test_a_drawn_digit_is_answered(
    browser: Browser, url: str, strokes: list[list[tuple[float, float]]], digit: str
) -> None:
    browser.open(f"{url}#try")
    browser.wait("!document.getElementById('drawing').hidden")
    draw(browser, strokes)
    browser.wait(f"document.querySelector('#answer .says')?.textContent === '{digit}'")
    assert "What else could it be?" in browser.text("#answer")
    assert browser.text("#answer .state").startswith(("Sure:", "Torn between", "Unlike anything"))
    assert browser.js("document.querySelector('#answer img.seen').naturalWidth") == 28
    assert browser.js("document.querySelectorAll('#answer tbody tr').length") == 10
    browser.wait(f"document.getElementById('live').textContent.startsWith('{digit}, probability')")
    browser.click("#clear")
    browser.wait("!document.querySelector('#answer .says')")


def test_the_answer_comes_quickly(browser: Browser, url: str) -> None:
    browser.open(f"{url}#try")
    browser.wait("!document.getElementById('drawing').hidden")
    times = []
    for k in range(8):
        browser.js("delete document.getElementById('answer').dataset.milliseconds")
        draw(browser, [[(0.2 + 0.07 * k, 0.2), (0.25 + 0.07 * k, 0.8)]])
        browser.wait("document.getElementById('answer').dataset.milliseconds")
        times.append(float(browser.js("document.getElementById('answer').dataset.milliseconds")))
    # 200 ms are promised on two idle cores; those that run tests are shared, so this only catches a blunder.
    assert statistics.median(times) < 1000


def test_a_digit_is_drawn_by_keys_alone(browser: Browser, url: str) -> None:
    browser.open(f"{url}#try")
    browser.wait("!document.getElementById('drawing').hidden")
    for _ in range(12):
        browser.key("Tab")
        if focused(browser) == "pad":
            break
    assert focused(browser) == "pad"
    browser.key("ArrowUp", 7)
    browser.key(" ")
    browser.key("ArrowDown", 14)
    browser.key(" ")
    browser.wait("document.querySelector('#answer .says')?.textContent === '1'")
    browser.key("Delete")
    browser.wait("!document.querySelector('#answer .says')")


def test_an_image_file_is_answered(browser: Browser, url: str, trained: Explorer, tmp_path: Path) -> None:
    row = int(np.flatnonzero((trained._labels == 0) & (trained._predicted == 0))[0])
    digit = np.kron(trained.test.inputs[row, 0].numpy(), np.ones((9, 9)))
    Image.fromarray((255 - digit).astype(np.uint8)).save(tmp_path / "zero.png")  # dark ink on white paper
    browser.open(f"{url}#try")
    browser.wait("!document.getElementById('uploading').hidden")
    browser.choose_file("#file", tmp_path / "zero.png")
    browser.wait("document.querySelector('#answer .says')?.textContent === '0'")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("huge.png", bytes(images.MOST_BYTES + 1), "too large: the limit is 10 MB"),
        ("broken.png", b"\x89PNG\r\n\x1a\nnot really", "not an image that can be read"),
        ("page.html", b"<script>alert(1)</script>", "not an image that can be read"),
    ],
)
def test_a_bad_upload_gets_a_polite_refusal(
    browser: Browser, url: str, tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    browser.open(f"{url}#try")
    browser.wait("!document.getElementById('uploading').hidden")
    browser.choose_file("#file", tmp_path / name)
    browser.wait("document.querySelector('#answer [role=alert]')")
    assert words in browser.text("#answer [role=alert]")
    draw(browser, ONE)  # and the page goes on
    browser.wait("document.querySelector('#answer .says')")


# --- examples and map ------------------------------------------------------------------------------------------------


def test_examples_are_filtered_opened_and_made_noisy(browser: Browser, url: str) -> None:
    browser.open(url)
    browser.wait("document.querySelectorAll('.tile').length === 48 && document.querySelector('.chart svg')")
    assert "1,500 examples" in browser.text("#count")
    browser.js(
        "(() => { const s = document.getElementById('filter-true'); s.value = '4';"
        " s.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )
    browser.wait("[...document.querySelectorAll('.tile b')].every((b) => b.textContent === '4')")
    browser.click(".grid li:nth-child(3) .tile")
    browser.wait("document.querySelector('.grid li:nth-child(3) .tile').getAttribute('aria-current')")
    index = browser.js("document.querySelector('.grid li:nth-child(3) .tile').dataset.index")
    browser.wait(f"document.querySelector('#detail h2')?.textContent.replace(',', '') === 'Example {index}'")
    browser.wait("document.querySelector('#detail .chart svg')")
    before = browser.js("document.querySelector('#detail img.seen').src")
    assert browser.js("document.querySelectorAll('#detail tbody .dots i').length") == 80
    browser.js(
        "(() => { const s = document.getElementById('noise'); s.value = '0.6';"
        " s.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )
    browser.wait(f"document.querySelector('#detail img.seen').src !== {json.dumps(before)}")
    assert "uncertainty" in browser.text("#noise-said")
    masks = "[...document.querySelectorAll('#detail .dots i')].map((i) => i.className).join()"
    drawn = browser.js(masks)
    browser.click("#detail tfoot button")
    browser.wait(f"{masks} !== {json.dumps(drawn)}")
    browser.js("history.back()")
    browser.wait("!location.hash.includes('index')")


def test_the_map_leads_to_examples(browser: Browser, url: str, trained: Explorer) -> None:
    counts = np.array(trained.map()["counts"])
    t, k = divmod(int((counts - np.diag(counts.diagonal())).argmax()), 10)
    browser.open(f"{url}#map")
    browser.wait(
        "document.querySelectorAll('#pairs-rho li').length && document.getElementById('map-counts').height > 200"
    )
    box = browser.js(
        "(() => { const e = document.getElementById('map-counts'); e.scrollIntoView({behavior: 'instant'});"
        " const b = e.getBoundingClientRect(); return [b.x, b.y, b.width]; })()"
    )
    margin = 20  # about what the names take at the left and at the top
    cell = (box[2] - margin) / 10
    browser.click_at(box[0] + margin + (k + 0.5) * cell, box[1] + margin + (t + 0.5) * cell)
    browser.wait(f"location.hash === '#examples?true={t}&predicted={k}'")
    browser.wait(f"document.querySelectorAll('.tile').length === {int(counts[t, k])}")
    assert browser.js("document.getElementById('filter-true').value") == str(t)
    # The list below the maps leads there as well, by rho.
    browser.open(f"{url}#map")
    browser.wait("document.querySelector('#pairs-rho button')")
    browser.click("#pairs-rho button")
    browser.wait("location.hash.includes('order=attention')")
    browser.wait("document.querySelector('.tile .num')?.textContent.startsWith('ρ')")


def test_everything_can_be_reached_by_keys(browser: Browser, url: str) -> None:
    browser.open(url)
    browser.wait("document.querySelector('.chart svg')")
    seen = []
    for _ in range(14):
        browser.key("Tab")
        seen.append(focused(browser))
        outline = (
            "(() => { const s = getComputedStyle(document.activeElement); return s.outlineStyle + s.outlineWidth; })()"
        )
        assert browser.js(outline) not in ("none0px", "none3px")
        if "tile" in seen[-1]:
            break
    assert seen[0] == "skip"
    assert [name for name in seen if name.startswith("filter")] == ["filter-true", "filter-predicted", "filter-order"]
    assert "tile" in seen[-1]
    place = "[...document.querySelectorAll('.tile')].indexOf(document.activeElement)"
    columns = browser.js("getComputedStyle(document.getElementById('grid')).gridTemplateColumns.split(' ').length")
    for key, expected in (
        ("Home", 0),
        ("ArrowRight", 1),
        ("ArrowDown", 1 + columns),
        ("ArrowLeft", columns),
        ("ArrowUp", 0),
        ("ArrowUp", 0),
        ("End", 47),
        ("Home", 0),
        ("ArrowRight", 1),
    ):
        browser.key(key)
        assert browser.js(place) == expected
    browser.key("Enter")
    browser.wait("location.hash.includes('index=')")
    browser.wait("document.getElementById('live').textContent.startsWith('Example')")
    browser.key("Tab")
    assert "tile" not in focused(browser)  # the grid is one stop, not forty-eight

    browser.open(f"{url}#map")
    browser.wait("document.querySelector('#pairs-rho button')")
    browser.js("document.querySelector('nav a:last-child').focus()")
    browser.key("Tab")
    assert focused(browser) == "map-rho"
    browser.key("ArrowRight", 2)
    browser.key("ArrowDown")
    assert browser.text("#readout").startswith("1 and 2: mean ρ")
    browser.key("Enter")
    browser.wait("location.hash === '#examples?true=1&rival=2&order=attention'")
    browser.wait("document.activeElement.classList.contains('tile')")  # the map that had the focus is hidden now
    assert browser.js("document.title").startswith("Examples · ")


# --- looks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_sticks_out_light_or_dark(browser: Browser, url: str, tmp_path: Path, width: int) -> None:
    for view, ready in (
        ("examples", "document.querySelectorAll('.tile').length"),
        ("try", "!document.getElementById('drawing').hidden"),
        ("map", "document.querySelector('#pairs-rho button')"),
    ):
        shades = []
        for dark in (False, True):
            browser.look(width, 860, dark=dark)
            browser.open(f"{url}#{view}")
            browser.wait(ready)
            assert browser.js("document.documentElement.scrollWidth") <= width
            picture = browser.screenshot(tmp_path / f"{view}-{width}-{dark}.png")
            shades.append(np.asarray(Image.open(io.BytesIO(picture.read_bytes())).convert("L")).mean())
        assert shades[0] - shades[1] > 60


@pytest.mark.parametrize("count", [2, 20, 200])
def test_the_map_is_legible_from_2_to_200_classes(browser: Browser, count: int) -> None:
    names = tuple(f"a rather long name of class {k}" for k in range(count))
    explorer = make_explorer(classes=names, shape=(6,), examples=max(40, count))
    with running(create_app(explorer)) as (host, port):
        for width in (1280, 400):
            browser.look(width, 860)
            browser.open(f"http://{host}:{port}/#map")
            browser.wait(
                "document.getElementById('map-rho').height > 100 && document.querySelector('#pairs-counts li')"
            )
            assert browser.js("document.documentElement.scrollWidth") <= width
            assert browser.js("document.getElementById('map-rho').clientWidth") >= 3 * count
            browser.js("document.getElementById('map-rho').focus()")
            browser.key("End")
            assert names[-1] in browser.text("#readout")


def test_names_with_html_are_shown_and_not_run(browser: Browser) -> None:
    names = ("<img src=x onerror='window.harmed=1'>", "</script><script>window.harmed=1</script>", "a\u202eb\x1b[2J")
    explorer = make_explorer(classes=names, shape=(3, 32, 32), examples=30)
    with running(create_app(explorer)) as (host, port):
        for view, ready in (("examples", ".chart svg"), ("map", "#pairs-counts li"), ("try", "#limits")):
            browser.open(f"http://{host}:{port}/#{view}")
            browser.wait(f"document.querySelector({json.dumps(ready)})")
            assert browser.js("window.harmed") is None
            assert browser.js("document.querySelectorAll('main script, img[src=x]').length") == 0
            if view == "examples":
                assert names[0] in browser.js("document.querySelector('#filter-true').textContent")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head": "softmax"}, "no masks: every ρ is 1"),
        ({"shape": (6,)}, "rows of features, not images"),
    ],
)
def test_models_without_masks_or_images_say_so(browser: Browser, options: dict[str, object], words: str) -> None:
    explorer = make_explorer(examples=30, **options)  # type: ignore[arg-type]
    with running(create_app(explorer)) as (host, port):
        browser.open(f"http://{host}:{port}/")
        browser.wait("document.querySelector('.chart svg')")
        browser.open(f"http://{host}:{port}/#try")
        browser.wait(f"document.querySelector('main').innerText.includes({json.dumps(words)})")


def test_nothing_is_asked_of_any_other_machine(browser: Browser, url: str) -> None:
    for view in ("examples", "try", "map"):
        browser.open(f"{url}#{view}")
        browser.wait("document.getElementById('summary').textContent.includes('mnist-5k')")
    asked = {request.split("/")[2] for request in browser.requests if request.startswith("http")}
    assert asked == {url.split("/")[2]}


def test_a_server_that_is_gone_is_said_plainly(browser: Browser) -> None:
    with running(create_app(make_explorer(examples=200))) as (host, port):
        browser.open(f"http://{host}:{port}/")
        browser.wait("document.querySelector('.chart svg')")
    browser.click("#next")
    browser.wait("document.getElementById('count').textContent.includes('does not answer')")
    browser.problems.clear()  # the browser logs the refused connection
