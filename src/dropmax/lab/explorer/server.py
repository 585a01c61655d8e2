"""The server behind the explorer: uvicorn, with its own limits, on a socket that is bound before the model loads."""

from __future__ import annotations

import ipaddress
import socket

import uvicorn
from fastapi import FastAPI

from dropmax.errors import RunError

__all__ = ["address", "bind", "is_loopback", "make_server", "serve"]

#: Connections and requests at once; uvicorn answers 503 beyond it. Systems often allow 1024 open files.
MOST_AT_ONCE = 256


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address; port 0 picks a free one."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise RunError(f"--host {host} is not an address of this machine: leave it out for 127.0.0.1") from None
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
    """Return the address to open in a browser for a bound socket."""
    name, port = bound.getsockname()[:2]
    if ipaddress.ip_address(name).is_unspecified:
        name = "127.0.0.1"
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/"


def is_loopback(bound: socket.socket) -> bool:
    """Return whether only this machine can reach a bound socket."""
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def make_server(app: FastAPI) -> uvicorn.Server:
    """Return the server, not yet running."""
    config = uvicorn.Config(
        app,
        ws="none",
        loop="asyncio",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing stands in front of this server, so X-Forwarded-For is never genuine
        limit_concurrency=MOST_AT_ONCE,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(config)


def serve(app: FastAPI, bound: socket.socket) -> None:
    """Serve until interrupted. A bound socket that already listens loses no early request."""
    try:
        make_server(app).run(sockets=[bound])
    except KeyboardInterrupt:
        pass
    finally:
        bound.close()
