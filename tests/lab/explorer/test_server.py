"""The real server on loopback: slow, endless and senseless connections, and a crowd."""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="needs FastAPI (the extra `explore`)")

from dropmax.errors import RunError
from dropmax.lab.explorer import Explorer, server
from dropmax.lab.explorer.app import create_app
from dropmax.lab.explorer.uploads import Uploads
from tests.lab.explorer.small import drawing, running, talk

Place = tuple[str, int]
POST = b"POST /api/try/%s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/octet-stream\r\n"


@pytest.fixture
def place(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A server with less patience than the real one: the tests have less, too."""
    monkeypatch.setattr(server, "SECONDS_OF_PATIENCE", 1.2)
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


@pytest.mark.parametrize(
    "opening", [b"", b"GET /api/about HTTP/1.1\r\nHost: 127", POST % b"drawing" + b"Content-Length: 9\r\n\r\n1"]
)
def test_a_connection_that_gets_nowhere_is_closed(place: Place, opening: bytes) -> None:
    started = time.monotonic()
    talk(place, opening)
    assert time.monotonic() - started < 5


def test_a_flood_of_silent_connections_locks_nobody_out(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 20)
    with running(create_app(explorer)) as place:
        kept = http.client.HTTPConnection(*place, timeout=20)
        kept.request("GET", "/api/about")
        assert kept.getresponse().read()
        silent = [socket.create_connection(place, timeout=20) for _ in range(60)]
        assert ask(place)[0] == 200
        # Those that waited longest had to go: the first 40 or so, and nobody who has just come.
        for connection in silent[:38]:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        silent[-1].sendall(b"GET /api/about HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert silent[-1].recv(15) == b"HTTP/1.1 200 OK"
        for connection in (*silent, kept):
            connection.close()


def test_whoever_is_being_answered_is_not_cut_for_a_newcomer(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 5)
    with running(create_app(explorer)) as place, socket.create_connection(place, timeout=20) as busy:
        content = drawing().tobytes()
        busy.sendall(
            POST % b"drawing" + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(content) + content[:9]
        )
        ask(place)  # by now the server has begun to read the drawing
        silent = [socket.create_connection(place, timeout=20) for _ in range(20)]
        ask(place)
        busy.sendall(content[9:])
        assert busy.recv(15) == b"HTTP/1.1 200 OK"
        for connection in silent:
            connection.close()


def test_patience_ends_when_it_is_said_to(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SECONDS_OF_PATIENCE", 2.0)
    with running(create_app(explorer)) as place:
        started = time.monotonic()
        talk(place, b"GET /api/about HTTP/1.1\r\nHost: 127")
        assert 1.9 < time.monotonic() - started < 3.9


def test_a_reader_that_does_not_read_is_closed(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SECONDS_OF_PATIENCE", 0.5)
    with running(create_app(explorer)) as place, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(place)
        # Pipelined, and none of the answers is ever fetched.
        connection.sendall(b"GET /static/style.css HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 1000)
        watch = select.poll()
        watch.register(connection, 0)  # hanging up is always told
        assert watch.poll(10_000), "the connection is still open"
        assert ask(place)[0] == 200


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
def test_what_is_no_http_gets_a_polite_400(place: Place, nonsense: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    answer = talk(place, nonsense)
    if answer:  # a long header may be cut off before the answer can be read
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 4")
        assert b"content-security-policy" in head
        assert list(json.loads(body)) == ["error"]
    assert ask(place)[0] == 200
    assert capfd.readouterr().err == ""  # a stranger's mistake is no news for whoever runs the server


def test_fifty_clients_at_once_are_all_served(explorer: Explorer) -> None:
    wrong: list[object] = []
    times: list[float] = []
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


def test_a_port_that_is_taken_is_reported() -> None:
    with server.bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=rf"cannot listen on port {port} of 127.0.0.1 .*choose another with --port"):
            server.bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "300.1.1.1", "", "x" * 300])
def test_an_address_that_is_none_is_reported(host: str) -> None:
    with pytest.raises(RunError, match=r"--host|cannot listen"):
        server.bind(host or "\x00", 0)


def test_the_printed_address_can_be_opened() -> None:
    for host, start in (("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:")):
        with server.bind(host, 0) as bound:
            assert server.address(bound) == f"{start}{bound.getsockname()[1]}/"
            assert server.is_loopback(bound) == (host == "127.0.0.1")
