"""The campaign against the explorer: a few seconds of it, and that it notices servers that break the promises."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs FastAPI (the extra `explore`)")

from dropmax.lab.explorer.guard import HEADERS
from hardening import attack, attack_server, attack_wire
from hardening.attack_requests import MARK, SCHEMA, Wire, make_request
from hardening.campaign import Outcome

SOUND = Wire(("GET", "/"), b"", well_formed=True)
LYING = Wire(("GET", "/"), b"", well_formed=False)


def test_the_explorer_withstands_the_short_campaign(tmp_path: Path) -> None:
    outcome = attack.run(short=True, seed=0, scratch=tmp_path)
    assert outcome.failures == []
    assert outcome.failed == 0
    assert outcome.tried == sum(outcome.counts.values()) > 800
    assert set(outcome.details["others_wait"]) >= {"fuzz", "foreign", "oversized", "crowd"}
    assert outcome.details["server"]["end"]["peak_mb"] > 50


def test_every_address_of_the_application_is_attacked() -> None:
    from unittest.mock import Mock

    from fastapi.routing import APIRoute

    from dropmax.lab.explorer import Explorer
    from dropmax.lab.explorer.app import create_app

    found = {}
    for route in create_app(Mock(spec=Explorer, map=dict, about=dict)).routes:
        assert isinstance(route, APIRoute), f"{route} is not attacked"
        names = [one.name for one in (*route.dependant.path_params, *route.dependant.query_params)]
        found.update({(method, route.path): set(names) for method in route.methods})
    assert found == {address: set(names) for address, names in SCHEMA.items()}


def test_the_same_seed_makes_the_same_requests_and_every_address_is_tried() -> None:
    requests = [make_request(3, number) for number in range(300)]
    assert requests == [make_request(3, number) for number in range(300)]
    assert requests != [make_request(4, number) for number in range(300)]
    assert {request.address for request in requests} == set(SCHEMA)
    assert {request.well_formed for request in requests} == {True, False}


def answer(status: int, body: bytes, kind: str = "application/json", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"content-type: {kind}", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in {**HEADERS, **headers}.items() if value]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


GOOD = answer(404, b'{"error":"There is nothing here."}')


@pytest.mark.parametrize(
    ("raw", "request_", "word", "complaint"),
    [
        (GOOD, SOUND, "404", None),
        (answer(200, b"{}"), SOUND, "200", None),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + GOOD, SOUND, "404", None),
        (b"", LYING, "cut", None),
        (b"", SOUND, "cut", "without an answer"),
        (None, LYING, "NO ANSWER", "no answer and no end"),
        (answer(500, b'{"error":"Oh."}'), LYING, "500", "answered 500"),
        (answer(400, b'{"error":"Oh."}'), SOUND, "400", "answered 400"),
        (answer(400, b'{"error":"Oh."}'), LYING, "400", None),
        (answer(307, b""), LYING, "307", "answered 307"),
        (b"220 smtp ready\r\n", LYING, "0", "answered 0"),
        (GOOD[:-5], SOUND, "0", "answered 0"),
        (GOOD + answer(500, b""), LYING, "500", "answered 500"),
        (answer(404, b'{"error":"x."}', **{"content-security-policy": ""}), SOUND, "404", "no content-security-policy"),
        (answer(200, b"{}", **{"access-control-allow-origin": "*"}), SOUND, "200", "access-control-allow-origin in"),
        (answer(200, b'{"a": NaN}'), SOUND, "200", "NaN is no JSON"),
        (answer(200, b'{"a": '), SOUND, "200", "JSON that is none"),
        (answer(404, b"Not Found", "text/plain"), SOUND, "404", "not JSON"),
        (answer(422, b'{"error":"a.","where":"app.py"}'), SOUND, "422", "not one sentence"),
        (answer(422, json.dumps({"error": f"{MARK} is wrong."}).encode()), SOUND, "422", "is repeated"),
        (answer(200, b"Traceback (most recent call last)", "text/html"), SOUND, "200", "a traceback"),
    ],
)
def test_an_answer_is_judged(raw: bytes | None, request_: Wire, word: str, complaint: str | None) -> None:
    kind, found = attack_wire.judge(request_, raw)
    assert kind == word
    assert (found is None) if complaint is None else complaint in str(found)


class Careless(BaseHTTPRequestHandler):
    """A server that answers whoever asks, breaks on some questions, and speaks of its insides."""

    def do_GET(self) -> None:
        broken = "noise" in self.path
        body = b"Traceback ..." if broken else b"{}"
        self.send_response(500 if broken else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def careless() -> Iterator[attack_wire.Place]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Careless)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield ("127.0.0.1", server.server_address[1])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_careless_server_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attack_wire, "PATIENCE", 3.0)
    with careless() as place:
        fuzzed, asked, crowded, slowed, sized = Outcome(), Outcome(), Outcome(), Outcome(), Outcome()
        attack.fuzz(place, fuzzed, 0, 60)
        attack.foreign(place, asked, 0, 5)
        attack.crowd(place, crowded, 3, 0.3)
        attack.slow(place, slowed, 5, hold=0.6, until_cut=True)
        attack.oversized(place, sized, 10_000, 2)
    assert fuzzed.failed > 20
    assert asked.failed > 100
    assert any("Host: evil.example" in line for line in asked.failures)
    assert crowded.failed > 0
    assert any("slow headers" in line for line in slowed.failures)
    assert sized.failed > 0


def test_a_late_answer_is_found_out() -> None:
    outcome = Outcome()
    with careless() as place, attack_server.Witness(place, outcome, patience=0.0) as witness:
        while not witness.wrong:
            time.sleep(0.01)
        witness.report()
    assert "was answered" in outcome.failures[0]


def test_a_server_that_grows_complains_or_writes_is_found_out(tmp_path: Path) -> None:
    from unittest.mock import Mock

    log, folder = tmp_path / "log", tmp_path / "run"
    folder.mkdir()
    log.write_text("starting\nTraceback (most recent call last):\n")
    server = attack_server.Server(Mock(returncode=-9), ("127.0.0.1", 1), log, folder, log_start=9)
    server.kept = attack_server.content(folder)
    (folder / "new").write_text("x")
    server.at_start = {"rss_mb": 100.0, "peak_mb": 100.0, "threads": 3, "files": 8}
    server.measure = lambda: {"rss_mb": 100.0, "peak_mb": 900.0, "threads": 30, "files": 80}  # type: ignore[method-assign]
    outcome = Outcome()
    server.report(outcome)
    server.report_end(outcome)
    said = "\n".join(outcome.failures)
    for words in ("800 MB more", "open files: 8", "threads: 3", "ended with -9", "said: Traceback", "files of the run"):
        assert words in said
    assert outcome.failed == 6
