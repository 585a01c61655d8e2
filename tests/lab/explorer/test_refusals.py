"""How the explorer refuses: bad requests, other hosts and origins, anything at all."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="needs FastAPI (the extra `explore`)")

from dropmax.lab import images
from dropmax.lab.explorer import Explorer
from dropmax.lab.explorer.guard import Uploads, allowed_host
from tests.lab.explorer.small import ADDRESSES, BYTES, drawing, make_explorer, picture, refused

# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "status", "words"),
    [
        ("/nothing", 404, "nothing here"),
        ("/static/nothing.js", 404, "nothing here"),
        ("/api/about/", 404, "nothing here"),
        ("/static/../app.py", 404, "nothing here"),
        ("/static/..%2f..%2fapp.py", 404, ""),
        ("/static/%2e%2e%2fapp.py", 404, ""),
        ("/static/%2fetc%2fpasswd", 404, ""),
        ("/static/main.js%00", 404, ""),
        ("/docs", 404, ""),
        ("/openapi.json", 404, ""),
        ("/api/examples/120", 404, "120 examples"),
        ("/api/examples/-1", 422, "index was not accepted"),
        ("/api/examples/1e3", 422, "index was not accepted"),
        ("/api/examples/..%2f..%2fetc", 404, ""),
        ("/api/examples/99999999999999999999", 422, "index"),
        ("/api/examples/" + "9" * 5000, 422, "index"),
        ("/api/examples/1?noise=nan", 422, "noise"),
        ("/api/examples/1?noise=inf", 422, "noise"),
        ("/api/examples/1?noise=-0.1", 422, "noise"),
        ("/api/examples/1?noise=1.5", 422, "less than or equal to 1"),
        ("/api/examples/1?noise=", 422, "noise"),
        ("/api/examples/1?seed=-1", 422, "seed"),
        ("/api/examples/1?seed=4294967296", 422, "seed"),
        ("/api/examples/1/noise?seed=x", 422, "seed"),
        ("/api/examples?page=0", 422, "page"),
        ("/api/examples?true=10", 422, "true must be a class from 0 to 9"),
        ("/api/examples?predicted=-1", 422, "predicted"),
        ("/api/examples?rival=11", 422, "rival must be a class"),
        ("/api/examples?order=<script>", 422, "order"),
        ("/api/examples?order=attention", 422, "as rival"),
    ],
)
def test_bad_requests_get_one_sentence(client: Any, address: str, status: int, words: str) -> None:
    response = client.get(address)
    refused(response, status, words)
    assert "<script>" not in response.text


@pytest.mark.parametrize(("method", "address"), [("POST", "/api/about"), ("GET", "/api/try/image"), ("PUT", "/")])
def test_other_methods_are_refused(client: Any, method: str, address: str) -> None:
    refused(client.request(method, address), 405, "does not take that kind of request")


@pytest.mark.parametrize(
    ("what", "content", "status", "words"),
    [
        ("drawing", b"", 422, "280 x 280 bytes"),
        ("drawing", b"x" * 100, 422, "280 x 280 bytes"),
        ("drawing", bytes(280 * 280), 422, "nothing drawn"),
        ("drawing", bytes(280 * 280 + 1), 413, "too large"),
        ("image", b"", 422, "empty"),
        ("image", b"GIF89a...", 422, "not an image that can be read"),
        ("image", picture()[:-40], 422, "damaged"),
        ("image?prepare=../x", picture(), 422, "prepare"),
    ],
)
def test_what_is_no_drawing_or_image_is_refused(
    client: Any, what: str, content: bytes, status: int, words: str
) -> None:
    refused(client.post(f"/api/try/{what}", content=content, headers=BYTES), status, words)


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", "application/json", ""])
def test_the_kinds_of_body_a_form_could_send_are_refused(client: Any, kind: str) -> None:
    for address in ("/api/try/image", "/api/try/drawing"):
        refused(client.post(address, content=picture(), headers={"content-type": kind}), 415, "octet-stream")


def test_too_large_is_refused_by_its_announcement_and_by_its_bytes(client: Any) -> None:
    headers = {**BYTES, "content-length": str(10**30)}
    refused(client.post("/api/try/image", content=b"x", headers=headers), 413, "the limit is 10 MB")

    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(40):
            sent += 2**20
            yield bytes(2**20)

    response = client.post("/api/try/image", content=endless(), headers=BYTES)
    refused(response, 413, "too large")
    assert response.headers["connection"] == "close"


def test_all_uploads_together_hold_bounded_memory(make_client: Callable[..., Any], explorer: Explorer) -> None:
    uploads = Uploads(most_held=1000)
    client = make_client(explorer, uploads=uploads)
    refused(client.post("/api/try/image", content=bytes(2000), headers=BYTES), 503, "try again")
    assert uploads.held == 0
    assert client.post("/api/try/image", content=picture(), headers=BYTES).status_code == 200
    assert uploads.held == 0


@pytest.mark.parametrize(
    ("shape", "address", "words"),
    [
        ((6,), "/api/try/image", "features"),
        ((6,), "/api/try/drawing", "does not take drawings"),
        ((3, 32, 32), "/api/try/drawing", "28 x 28 grey"),
        ((3, 32, 32), "/api/try/image?prepare=mnist", "28 x 28 grey"),
    ],
)
def test_what_a_model_does_not_take_is_refused(
    make_client: Callable[..., Any], shape: tuple[int, ...], address: str, words: str
) -> None:
    client = make_client(make_explorer(shape=shape, examples=12))
    refused(client.post(address, content=drawing().tobytes(), headers=BYTES), 409, words)


def test_a_bug_of_ours_shows_nothing_of_our_insides(
    make_client: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    explorer = make_explorer(examples=12)
    client = make_client(explorer)
    monkeypatch.setattr(explorer, "example", lambda *_, **__: {}["/secret/path"])
    refused(client.get("/api/examples/1"), 500, "went wrong")
    assert "KeyError" in capsys.readouterr().err
    assert client.get("/api/about").status_code == 200


def test_an_answer_that_is_not_finite_is_a_sentence(make_client: Callable[..., Any]) -> None:
    explorer = make_explorer(examples=12)
    client = make_client(explorer)
    with torch.no_grad():
        explorer.trained.model.head.classifier.bias.fill_(float("inf"))
    refused(client.get("/api/examples/1"), 422, "not finite")


def test_a_crowd_is_asked_to_come_back(make_client: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dropmax.lab.explorer.app.Worker.__init__.__defaults__", (2, 0))
    refused(make_client(make_explorer(examples=12)).get("/api/examples/1"), 503, "busy")


# --- hosts and origins -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8765", "localhost:8765", "localhost", "[::1]:9000", "127.0.0.1", "LOCALHOST"]
)
def test_our_own_names_are_answered(client: Any, host: str) -> None:
    assert client.get("/api/about", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8765",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "192.168.0.7:8765",
        "0.0.0.0",
        "127.0.0.1@evil.example",
        "localhost:8765/evil",
        "",
        "[::1",
        "127.0.0.1:99999999",
    ],
)
@pytest.mark.parametrize("address", ["/", "/static/main.js", "/api/about"])
def test_a_name_of_another_site_is_refused(client: Any, host: str, address: str) -> None:
    refused(client.get(address, headers={"host": host}), 421, "does not answer to that name")


@given(st.text(min_size=1))
def test_no_name_but_ours_is_answered(host: str) -> None:
    if allowed_host(host, "127.0.0.1"):
        assert host.lower().split(":")[0] == "localhost" or host.startswith(("127.", "[::"))


def test_a_server_for_others_answers_to_addresses_and_its_own_name() -> None:
    for host in ("192.168.0.7:80", "[fe80::1]", "localhost", socket.gethostname(), "10.0.0.1"):
        assert allowed_host(host, "0.0.0.0")
    assert allowed_host("lab-machine:8765", "lab-machine")
    assert not allowed_host("evil.example", "0.0.0.0")
    assert not allowed_host("evil.example", "192.168.0.7")


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "http://localhost:8765"},
        {"origin": "http://127.0.0.1:8765.evil.example"},
        {"origin": ""},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_posts_from_other_pages_are_refused(client: Any, headers: dict[str, str]) -> None:
    response = client.post("/api/try/drawing", content=drawing().tobytes(), headers={**BYTES, **headers})
    refused(response, 403, "own page")
    assert "access-control-allow-origin" not in response.headers


def test_our_own_page_and_programs_may_post(client: Any) -> None:
    for headers in ({"origin": "http://127.0.0.1:8765", "sec-fetch-site": "same-origin"}, {}):
        response = client.post("/api/try/drawing", content=drawing().tobytes(), headers={**BYTES, **headers})
        assert response.status_code == 200


def test_other_pages_may_link_here_but_not_read(client: Any) -> None:
    for elsewhere in ({"sec-fetch-site": "cross-site"}, {"origin": "http://evil.example"}, {"origin": "null"}):
        assert client.get("/", headers=elsewhere).status_code == 200
        refused(client.get("/api/about", headers=elsewhere), 403)
        refused(client.get("/static/main.js", headers=elsewhere), 403)
    preflight = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    refused(client.options("/api/try/drawing", headers=preflight), 403)


def test_websockets_are_closed(client: Any) -> None:
    from starlette.websockets import WebSocketDisconnect

    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/api/about"):
        pass


# --- anything at all -------------------------------------------------------------------------------------------------

_values = st.one_of(st.integers().map(str), st.floats().map(str), st.text(max_size=12), st.just("../../etc/passwd"))
_names = st.sampled_from(["true", "predicted", "rival", "order", "page", "noise", "seed", "prepare", "x"])


@settings(max_examples=150)
@given(
    st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS"]),
    st.sampled_from([*ADDRESSES, "/api/try/image", "/api/try/drawing", "/static/", "/api/examples/"]),
    st.text(max_size=8),
    st.lists(st.tuples(_names, _values), max_size=4),
    st.binary(max_size=300),
    st.sampled_from(["application/octet-stream", "image/png", "text/plain"]),
)
def test_whatever_is_asked_the_answer_is_json_and_polite(
    client: Any, method: str, address: str, more: str, query: list[tuple[str, str]], body: bytes, kind: str
) -> None:
    path = address + quote(more.encode("utf-8", "surrogatepass"), safe="/")
    search = urlencode([(name, value.encode("utf-8", "surrogatepass")) for name, value in query])
    response = client.request(method, f"{path}?{search}", content=body, headers={"content-type": kind})
    assert response.status_code < 500
    assert "content-security-policy" in response.headers
    if response.status_code >= 400:
        refused(response, response.status_code)
    elif path.startswith("/api"):
        json.loads(response.text)


def test_no_request_writes_a_file_or_opens_one_it_names(client: Any, tmp_path: Any) -> None:
    opened: list[tuple[str, Any, int]] = []
    watching = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and isinstance(arguments[0], (str, bytes)):
            opened.append((os.fsdecode(arguments[0]), arguments[1], arguments[2] or 0))

    sys.addaudithook(hook)  # it cannot be taken away again, only told to look elsewhere
    try:
        for address in (*ADDRESSES, "/static/main.js", "/static/%2fetc%2fpasswd", "/static/..%2fapp.py"):
            client.get(address)
        for form in images.FORMATS:
            for prepare in ("none", "mnist"):
                client.post(f"/api/try/image?prepare={prepare}", content=picture(form), headers=BYTES)
        client.post("/api/try/drawing", content=drawing().tobytes(), headers=BYTES)
    finally:
        watching = False
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    assert [path for path, _, flags in opened if flags & writing] == []
    assert [path for path, _, _ in opened if "passwd" in path or path.endswith("app.py")] == []


def test_a_drawing_has_the_size_of_the_page_s_canvas(client: Any) -> None:
    from dropmax.lab.explorer.app import CANVAS

    assert f"SIDE = {CANVAS};" in client.get("/static/tryout.js").text
    assert f'width="{CANVAS}" height="{CANVAS}"' in client.get("/").text
    assert np.asarray(drawing()).shape == (CANVAS, CANVAS)
