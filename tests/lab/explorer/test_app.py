"""Every address of the explorer: what it answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs FastAPI (the extra `explore`)")

from dropmax.lab import images
from dropmax.lab.explorer import Explorer
from tests.lab.explorer.small import ADDRESSES, BYTES, drawing, make_explorer, picture


def test_the_page_and_its_files_are_there(client: Any) -> None:
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    named = {part.split('"')[0] for part in page.text.split('"/static/')[1:]}
    assert {"style.css", "main.js", "icon.svg"} <= named
    for name in (*named, "page.js", "answer.js", "examples.js", "tryout.js", "map.js", "noise.js"):
        file = client.get(f"/static/{name}")
        assert file.status_code == 200
        assert "http://" not in file.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in file.text
        for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert sink not in file.text
    assert "<script>" not in page.text
    assert " style=" not in page.text


@pytest.mark.parametrize("address", ADDRESSES)
def test_headers_are_strict_and_no_other_site_is_invited(client: Any, address: str) -> None:
    response = client.get(address, headers={"sec-fetch-site": "same-origin"})
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cross-origin-resource-policy"] == "same-origin"
    assert not [name for name in response.headers if name.startswith("access-control")]
    assert "server" not in response.headers


def test_the_addresses_answer_what_the_explorer_knows(client: Any, explorer: Explorer) -> None:
    assert client.get("/api/about").json() == explorer.about()
    assert client.get("/api/map").json() == explorer.map()
    assert client.get("/api/examples?true=3&order=easiest&page=2").json() == explorer.examples(
        true=3, order="easiest", page=2
    )
    assert client.get("/api/examples?true=1&order=attention&rival=7").json() == explorer.examples(
        true=1, order="attention", rival=7
    )
    assert client.get("/api/examples/5?noise=0.25&seed=9").json() == explorer.example(5, noise=0.25, seed=9)
    assert client.get("/api/examples/5/noise?seed=2").json() == explorer.noise(5, seed=2)


def test_a_drawing_is_answered(client: Any) -> None:
    answer = client.post("/api/try/drawing?seed=3", content=drawing().tobytes(), headers=BYTES).json()
    assert len(answer["rows"]) == 10
    assert answer["image"].startswith("data:image/png;base64,")
    assert "true" not in answer


@pytest.mark.parametrize("form", images.FORMATS)
@pytest.mark.parametrize("prepare", ["none", "mnist"])
def test_an_image_is_answered(client: Any, form: str, prepare: str) -> None:
    response = client.post(f"/api/try/image?prepare={prepare}", content=picture(form), headers=BYTES)
    assert response.status_code == 200
    assert 0 <= response.json()["probability"] <= 1


def test_names_with_html_and_control_characters_are_only_text(make_client: Callable[..., Any]) -> None:
    names = ("<img src=x onerror=alert(1)>", "a\x1b[2J\u202eb", "\ud800", "</script>", "")
    client = make_client(make_explorer(classes=names, examples=10))
    response = client.get("/api/about")
    assert response.headers["content-type"] == "application/json"
    assert response.json()["classes"] == ["<img src=x onerror=alert(1)>", "a�[2J�b", "�", "</script>", "class 4"]
