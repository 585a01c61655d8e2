"""The server: a socket bound before anything else, and connections that must get somewhere or are closed."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import struct
from collections.abc import Callable

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from dropmax.errors import RunError
from dropmax.lab.explorer.guard import HEADERS

__all__ = ["address", "bind", "is_loopback", "make_server", "serve"]

#: A request must begin within this time of its connection, and be answered and read within it of its first byte.
SECONDS_OF_PATIENCE = 30.0
#: Connections at once; for one more, that which has waited longest is cut. Systems often allow 1024 open files.
MOST_CONNECTIONS = 512
#: Connections taken in before any is looked at (these come on top), and those the system keeps waiting before that:
#: whoever finds that queue full knocks again only after a second.
TAKEN_AT_ONCE, QUEUE = 128, 1024


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address; port 0 picks a free one.

    >>> with bind("127.0.0.1", 0) as bound:
    ...     bound.getsockname()[0]
    '127.0.0.1'
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise RunError(f"--host {host} is no address of this machine: leave it out for 127.0.0.1") from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place)
    except OSError as error:
        bound.close()
        raise RunError(
            f"cannot listen on port {port} of {host} ({error.strerror}): "
            "choose another with --port, or 0 for a free one"
        ) from None
    return bound


def address(bound: socket.socket) -> str:
    """Return the address to open in a browser for a bound socket.

    >>> with bind("127.0.0.1", 0) as bound:
    ...     address(bound).startswith("http://127.0.0.1:")
    True
    """
    name, port = bound.getsockname()[:2]
    if ipaddress.ip_address(name).is_unspecified:
        name = "127.0.0.1"
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/"


def is_loopback(bound: socket.socket) -> bool:
    """Return whether only this machine can reach a bound socket.

    >>> with bind("127.0.0.1", 0) as bound:
    ...     is_loopback(bound)
    True
    """
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def make_server(app: FastAPI, *, on_start: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """Return the server, not yet running; ``on_start`` is called once requests are answered.

    >>> make_server(FastAPI()).started
    False
    """
    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        loop="asyncio",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # whoever sends X-Forwarded-For would only be believed
        backlog=TAKEN_AT_ONCE,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=2,
    )
    return _Server(config, on_start)


def serve(app: FastAPI, bound: socket.socket, *, on_start: Callable[[], None] = lambda: None) -> None:
    """Serve until interrupted."""
    try:
        make_server(app, on_start=on_start).run(sockets=[bound])
    except KeyboardInterrupt:
        pass
    finally:
        bound.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or []:
            bound.listen(QUEUE)
        if self.started:
            self._on_start()


class PatientProtocol(H11Protocol):
    """HTTP/1.1 that is patient, but not for ever: uvicorn itself waits without end for headers that never come.

    A connection that neither finishes a request in ``SECONDS_OF_PATIENCE`` nor rests between two is cut: slow
    headers, slow bodies, and readers that do not read. Where there are ``MOST_CONNECTIONS``, the newest takes the place
    of the one that has waited longest, first of those that ask nothing: a flood of silent ones locks nobody out.

    >>> issubclass(PatientProtocol, H11Protocol)
    True
    """

    _silent = True
    _waits_since = 0.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to watch the connection."""
        super().connection_made(transport)
        self._waits_since = self.loop.time()
        self._look_later(SECONDS_OF_PATIENCE)
        if len(self.connections) > MOST_CONNECTIONS:
            others = (one for one in self.connections if isinstance(one, PatientProtocol) and one is not self)
            min(others, key=lambda one: (one._is_asked(), one._waits_since))._cut()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Note when a request begins."""
        if self._silent:
            self._silent, self._waits_since = False, self.loop.time()
        super().data_received(data)

    def on_response_complete(self) -> None:
        """Note when an answer is done."""
        self._silent, self._waits_since = True, self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in the form of every other error."""
        if self._is_asked():  # the rest of a request was nonsense: nobody waits for its own answer any more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = json.dumps({"error": "That was not a request of HTTP that can be understood."}).encode()
        head = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        head += HEADERS.items()
        try:
            for event in (h11.Response(status_code=400, headers=head), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:  # in the midst of another answer
            self.transport.abort()
        self.transport.close()

    def _look_later(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        resting = self.timeout_keep_alive_task is not None and not self.transport.get_write_buffer_size()
        patience = SECONDS_OF_PATIENCE - (0.0 if resting else self.loop.time() - self._waits_since)
        if patience <= 0:
            self._cut()
        else:
            self._look_later(patience)

    def _is_asked(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _cut(self) -> None:
        # Reset it: after a plain close the kernel would keep what the other side does not fetch.
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connections.discard(self)  # now, not when the loop comes to it: several may be cut in one turn
        self.transport.abort()
