"""The real server on loopback: slow and endless uploads, bytes that are not HTTP, and many clients at once."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="needs FastAPI (the extra `explore`)")

from dropmax.errors import RunError
from dropmax.lab.explorer import Explorer, server
from dropmax.lab.explorer.app import create_app
from dropmax.lab.explorer.guard import Uploads
from tests.lab.explorer.small import drawing, running, talk

Place = tuple[str, int]
POST = b"POST /api/try/%s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/octet-stream\r\n"


@pytest.fixture
def place(explorer: Explorer) -> Iterator[Place]:
    """A server that gives uploads less time than the real one, to keep the tests short."""
    with running(create_app(explorer, uploads=Uploads(seconds=0.6))) as found:
        yield found


def ask(
    place: Place, method: str = "GET", path: str = "/api/examples/3", body: bytes | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*place, timeout=20)
    connection.request(method, path, body, {"content-type": "application/octet-stream"} if body else {})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, content


def test_the_server_answers(place: Place) -> None:
    assert ask(place)[0] == 200
    assert ask(place, "POST", "/api/try/drawing", drawing().tobytes())[0] == 200


def test_a_slow_upload_is_given_up_and_others_are_served_meanwhile(place: Place) -> None:
    # Twenty bodies that never come, and then somebody with a real question.
    head = POST % b"image" + b"Content-Length: 5000\r\n\r\nabc"
    slow = [socket.create_connection(place, timeout=10) for _ in range(20)]
    for connection in slow:
        connection.sendall(head)
    started = time.monotonic()
    assert ask(place)[0] == 200
    assert time.monotonic() - started < 0.6
    for connection in slow:
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"seconds to arrive" in answer
        connection.close()


def test_an_endless_upload_is_cut_off(place: Place) -> None:
    connection = socket.create_connection(place, timeout=10)
    connection.sendall(POST % b"image" + b"Transfer-Encoding: chunked\r\n\r\n")
    chunk = b"100000\r\n" + bytes(2**20) + b"\r\n"
    sent = 0
    try:
        while sent < 200:
            connection.sendall(chunk)
            sent += 1
    except OSError:
        pass
    connection.close()
    assert sent < 100
    assert ask(place)[0] == 200


def test_more_connections_than_allowed_are_told_to_come_back(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_AT_ONCE", 5)
    with running(create_app(explorer)) as place:
        silent = [socket.create_connection(place, timeout=20) for _ in range(8)]
        assert ask(place)[0] == 503
        for connection in silent:
            connection.close()
        until = time.monotonic() + 5
        while ask(place)[0] != 200:
            assert time.monotonic() < until, "the server still refuses after the connections were closed"


def test_a_connection_that_rests_between_requests_is_kept(place: Place) -> None:
    connection = http.client.HTTPConnection(*place, timeout=10)
    for _ in range(3):
        connection.request("GET", "/api/about")
        assert connection.getresponse().read()
        time.sleep(1.3)
    connection.close()


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"HELLO\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
        POST % b"drawing" + b"Transfer-Encoding: chunked\r\n\r\nzzz\r\n",
        POST % b"drawing" + b"Content-Length: -5\r\n\r\n",
        b"GET /api/about HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n",
    ],
    ids=["tls", "words", "two-hosts", "no-host", "long-header", "bad-chunk", "negative-length", "bad-chunk-to-get"],
)
def test_what_is_not_http_gets_a_400(place: Place, nonsense: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    answer = talk(place, nonsense)
    if answer:  # a long header may be cut off before the answer can be read
        assert answer.startswith(b"HTTP/1.1 4")
        assert b"Traceback" not in answer
    assert ask(place)[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_fifty_clients_at_once_are_all_served(explorer: Explorer) -> None:
    wrong: list[object] = []
    times: list[float] = []
    resource = pytest.importorskip("resource", reason="measures memory as POSIX does")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def client(number: int) -> None:
        try:
            for path in ("/", "/api/examples", f"/api/examples/{number}?noise=0.3", "/api/map"):
                started = time.monotonic()
                status, content = ask(place, path=path)
                times.append(time.monotonic() - started)
                if status != 200 or not content:
                    wrong.append((path, status))
            status, _ = ask(place, "POST", "/api/try/drawing", drawing().tobytes())
            if status != 200:
                wrong.append(status)
        except Exception as error:
            wrong.append(error)

    with running(create_app(explorer)) as place:
        threads = [threading.Thread(target=client, args=(number,)) for number in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert len(times) == 200
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 300, f"{grown:.0f} MB more at its height"


# --- the address -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["no-such-host.invalid", "300.1.1.1", "", "x" * 300])
def test_an_address_that_is_none_is_reported(host: str) -> None:
    with pytest.raises(RunError, match=r"--host|cannot listen"):
        server.bind(host or "\x00", 0)


def test_the_printed_address_can_be_opened() -> None:
    for host in ("127.0.0.1", "0.0.0.0"):
        with server.bind(host, 0) as bound:
            assert server.address(bound) == f"http://127.0.0.1:{bound.getsockname()[1]}/"
            assert server.is_loopback(bound) == (host == "127.0.0.1")
