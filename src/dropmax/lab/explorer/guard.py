"""Which requests are allowed, how much of a body is read, and what answers look like: strict headers, no traceback."""

from __future__ import annotations

import ipaddress
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Guard", "Uploads", "allowed_host", "polite", "same_origin"]

HEADERS = {
    # The page is files of our own and nothing else: no inline code, no eval, no other site, no frame around it.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

#: After a refusal the rest of the body may still be coming; closing is how to stop listening.
_CLOSE = {"connection": "close"}
_HOST = re.compile(r"(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::\d{1,5})?", re.IGNORECASE)


class Guard:
    """ASGI middleware around the explorer for a server bound to the address ``bound``.

    A page of another site could point its own name at 127.0.0.1 and then read this server (DNS rebinding), so the
    Host header must be a name that only this server answers to. Such a page could also post to the server or include
    its data, so every address but the page itself must be requested by the explorer's own page. Programs that send
    no Origin, such as curl, are not browsers and may ask.
    """

    def __init__(self, app: ASGIApp, bound: str) -> None:
        self.app, self.bound = app, bound

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on; every answer gets the strict headers."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._refusal(scope)
        try:
            await (refusal or self.app)(scope, receive, send_with_headers)
        except Exception as error:
            # A bug of ours: one line for the server's log, no internals for the client.
            print(f"dropmax explore: {scope['method']} {scope['path']!r}: {error!r}", file=sys.stderr, flush=True)
            if not started:
                sorry = polite(500, "Something went wrong here; the explorer keeps running.")
                await sorry(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not allowed_host(hosts[0], self.bound):
            return polite(421, "This explorer does not answer to that name: use the address it printed.")
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        from_elsewhere = origin is not None and not same_origin(origin, hosts[0])
        # A link from elsewhere may open the page itself, but no other page may read or include our data, or post.
        opens_page = scope["method"] in ("GET", "HEAD") and scope["path"] == "/"
        if (from_elsewhere or site in ("cross-site", "same-site")) and not opens_page:
            return polite(403, "Only the explorer's own page may ask for this.")
        return None


def polite(status: int, sentence: str, **headers: str) -> JSONResponse:
    """Return an error as every error of the explorer looks: ``{"error": sentence}``."""
    return JSONResponse({"error": sentence}, status, headers=headers)


def allowed_host(host: str, bound: str) -> bool:
    """Return whether a Host header names a server bound to ``bound``, in a way no other site's name can.

    A server on a loopback address answers to loopback addresses and ``localhost``, with any port, so that a tunnel
    works. One bound to another address answers to any literal address, which no name server can redirect, to the
    name it was bound by and to this machine's name too.
    """
    match = _HOST.fullmatch(host)
    if match is None:
        return False
    name = (match["six"] or match["name"]).lower()
    if name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return not _is_loopback(bound) and name in (bound.lower(), socket.gethostname().lower())
    return address.is_loopback or not _is_loopback(bound)


def _is_loopback(bound: str) -> bool:
    try:
        return ipaddress.ip_address(bound).is_loopback
    except ValueError:
        return bound.lower() == "localhost"


def same_origin(origin: str, host: str) -> bool:
    """Return whether an Origin header is that of a page served under this Host."""
    return origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


class Uploads:
    """Reads bodies into memory, never to disk; ``held`` counts the bytes of all uploads at work."""

    def __init__(self, seconds: float = 15.0, most_held: int = 64 * 2**20) -> None:
        self.seconds, self.most_held = seconds, most_held
        self.held = 0

    @asynccontextmanager
    async def body(self, request: Request, limit: int) -> AsyncIterator[bytes]:
        """Read a body of at most ``limit`` bytes within the time allowed; its bytes count as held until the end."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > 12 or int(declared) > limit):
            raise _too_large(limit)
        held, content = 0, bytearray()
        try:
            with anyio.fail_after(self.seconds):
                async for piece in request.stream():
                    if len(content) + len(piece) > limit:
                        raise _too_large(limit)
                    if self.held + len(piece) > self.most_held:
                        busy = "Too much is being sent at once: please try again in a moment."
                        raise HTTPException(503, busy, _CLOSE)
                    self.held += len(piece)
                    held += len(piece)
                    content += piece
            yield bytes(content)
        except TimeoutError:
            sentence = f"The file took longer than {self.seconds:.0f} seconds to arrive."
            raise HTTPException(408, sentence, _CLOSE) from None
        except ClientDisconnect:
            raise HTTPException(400, "The file did not arrive whole.", _CLOSE) from None
        finally:
            self.held -= held


def _too_large(limit: int) -> HTTPException:
    size = f"{limit / 2**20:.0f} MB" if limit >= 2**20 else f"{limit:,} bytes"
    return HTTPException(413, f"That is too large: the limit is {size}.", _CLOSE)
