"""Requests to the explorer, each made from a seed and a number alone: mostly right, wrong in one or two places."""

from __future__ import annotations

import functools
import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

import numpy as np
from PIL import Image

#: Every address: method, path, and the names it takes in its path and query. A test compares it with the application.
SCHEMA: dict[tuple[str, str], tuple[str, ...]] = {
    ("GET", "/"): (),
    ("GET", "/static/{name}"): ("name",),
    ("GET", "/api/about"): (),
    ("GET", "/api/map"): (),
    ("GET", "/api/examples"): ("true", "predicted", "rival", "order", "page"),
    ("GET", "/api/examples/{index}"): ("index", "noise", "seed"),
    ("GET", "/api/examples/{index}/noise"): ("index", "seed"),
    ("POST", "/api/try/drawing"): ("seed",),
    ("POST", "/api/try/image"): ("prepare", "seed"),
}
RIGHT: dict[str, Callable[[random.Random], str]] = {
    "name": lambda rng: rng.choice(["main.js", "style.css", "index.html"]),
    "index": lambda rng: str(rng.randrange(60)),
    "true": lambda rng: str(rng.randrange(3)),
    "predicted": lambda rng: str(rng.randrange(3)),
    "rival": lambda rng: str(rng.randrange(3)),
    "order": lambda rng: rng.choice(["hardest", "easiest", "attention"]),
    "page": lambda rng: str(rng.randint(1, 9)),
    "noise": lambda rng: f"{rng.random():.3f}",
    "seed": lambda rng: str(rng.randrange(2**31)),
    "prepare": lambda rng: rng.choice(["mnist", "none"]),
}
#: A part of this in an answer would mean that what was sent is repeated to whoever reads.
MARK = "zq7<script>"

_ODD_VALUES = [
    *("", "-1", "1e3", "nan", "inf", "-inf", "0x10", "1_0", " 1", "+1", "1.5", "true", "null", "[]", "{}", "99999"),
    *("../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%00", "%ff%fe", "%ed%a0%80", "%u0041", "a" * 3000, "9" * 5000),
    *("'; drop table x; --", "${jndi:ldap://x}", "{{7*7}}", "%0d%0aSet-Cookie:%20a=b", "٣", "１", "\U0001f41b", MARK),
    *("2147483647", "2147483648", "-2147483649", "18446744073709551616", "1" + "0" * 400, "4.9e-324", "1e400"),
]
_ODD_METHODS = ["HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "PROPFIND", "get", "G" * 300]
_ODD_PATHS = [
    *("/nothing", "//", "/api", "/api/", "/api//examples", "/API/about", "/static/", "/docs", "/openapi.json"),
    *("/static/../app.py", "/static/%2e%2e%2fapp.py", "/static/..\\app.py", "/%2fetc%2fpasswd", "/%", "/%zz", "/%00"),
    *("/" + "a/" * 500, "/api/examples/1/noise/2", "/api/try/image/", f"/{MARK}".replace("<", "%3c"), "*"),
    *("http://127.0.0.1/api/about", "http://evil.example/api/about", "/api/about?", "/api/about#x", "/;x=y"),
]
_ODD_KINDS = [
    *("text/plain", "application/json", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"),
    *("", "image/", "image/svg+xml", "image/png; " + "a" * 2000, ";;;;", "application/octet-stream;" * 30, "\xff\xfe"),
]
_ODD_HEADERS = [
    *(
        "Accept: */*;q=nonsense",
        "Accept-Encoding: " + "x," * 500,
        "Range: bytes=0-0,1-1,2-99999999999",
        "Cookie: =;=;=",
    ),
    *("If-Modified-Since: yesterday", "Authorization: Basic !!!", "X-Forwarded-For: ::::", "X-Forwarded-Host: evil"),
    *("Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x", "Upgrade: h2c", "Expect: 100-continue"),
    *(
        "Expect: everything",
        "Connection: keep-alive, close, x",
        "TE: trailers",
        "Content-Encoding: gzip",
        "X: \xff\x80",
    ),
    *("Forwarded: host=evil.example", "Content-Disposition: attachment; filename=../../x", "\r\n".join(["A: b"] * 90)),
]


@dataclass(frozen=True)
class Wire:
    """What goes over the wire: the address it is meant for, the bytes, and whether HTTP demands an answer to them."""

    address: tuple[str, str]
    sent: bytes
    well_formed: bool
    head_only: bool = False


def make_request(seed: int, number: int) -> Wire:
    """Return request ``number``: a right one to some address, spoiled in none, one or two places."""
    rng = random.Random(seed * 1_000_003 + number)
    address = rng.choice(list(SCHEMA))
    method, path = address
    spoiled = set(
        rng.sample(["method", "path", "values", "headers", "kind", "body", "framing"], rng.choice([0, 1, 1, 2]))
    )
    values = {name: RIGHT[name](rng) for name in SCHEMA[address] if f"{{{name}}}" in path or rng.random() < 0.5}
    if values.get("order") == "attention":
        values.setdefault("rival", "1")
    if "values" in spoiled and SCHEMA[address]:
        values[rng.choice(SCHEMA[address])] = rng.choice(_ODD_VALUES)
    query = [(name, value) for name, value in values.items() if f"{{{name}}}" not in path]
    if "values" in spoiled:
        query += rng.choices([*query, ("x", MARK), ("", ""), ("seed", "1"), ("true", "0")], k=rng.randrange(3))
    for name, value in values.items():
        path = path.replace(f"{{{name}}}", _escaped(value, "") or "%20")
    if query:
        path += "?" + "&".join(f"{_escaped(name)}={_escaped(value)}" for name, value in query)
    if "path" in spoiled:
        path = rng.choice(_ODD_PATHS)
    if "method" in spoiled:
        method = rng.choice([*_ODD_METHODS, "GET", "POST"])
    headers = ["Host: 127.0.0.1", "Connection: close"]
    if "headers" in spoiled:
        headers += rng.sample(_ODD_HEADERS, 2)
    body = None
    if address[0] == "POST" or "body" in spoiled:
        body = _odd_body(rng) if "body" in spoiled else _body_for(address, rng)
        kind = rng.choice(_ODD_KINDS) if "kind" in spoiled else "application/octet-stream"
        headers.append(f"Content-Type: {kind}")
    framing, body, well_formed = _frame(body, rng, "framing" in spoiled)
    headers += framing
    head = "\r\n".join([f"{method} {path} HTTP/1.1", *headers]).encode("latin-1") + b"\r\n\r\n"
    well_formed &= not {"method", "path"} & spoiled and max(map(ord, "".join(headers))) < 127
    return Wire(address, head + body, well_formed, head_only=method == "HEAD")


def request(method: str, path: str, body: bytes = b"") -> bytes:
    """A right request, after which the connection ends."""
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Content-Type: application/octet-stream\r\n\r\n" + body


def _escaped(text: str, safe: str = "%") -> str:
    return quote(text, safe=safe + "./-_+:;,'$()[]{}|")


def _frame(body: bytes | None, rng: random.Random, spoil: bool) -> tuple[list[str], bytes, bool]:
    """Return headers that say how long the body is, the body as sent, and whether the two agree."""
    if not spoil:
        if body is None:
            return [], b"", True
        if rng.random() < 0.2:
            return ["Transfer-Encoding: chunked"], _chunked(body, rng), True
        return [f"Content-Length: {len(body)}"], body, True
    body = body or b""
    length = len(body)
    lies = [
        [f"Content-Length: {length + rng.choice([1, 100, 10**6, 10**12, 10**30])}"],
        [f"Content-Length: {rng.choice(['-1', '1e3', '0x10', '', '+5', '5 5', '٣'.encode().decode('latin-1')])}"],
        [f"Content-Length: {length}", f"Content-Length: {length + 1}"],
        [f"Content-Length: {length}", "Transfer-Encoding: chunked"],
        ["Transfer-Encoding: chunked"],
        ["Transfer-Encoding: gzip, chunked"],
        ["Transfer-Encoding: chunked, identity"],
        [f"Content-Length : {length}"],
        [" folded: yes"],
        [f"Content-Length: {length // 2}"],  # what is over is the next, senseless, request
    ]
    return rng.choice(lies), body, False


def _chunked(body: bytes, rng: random.Random) -> bytes:
    pieces, at = [], 0
    while at < len(body):
        size = rng.randint(1, max(1, len(body) // 3))
        piece = body[at : at + size]
        pieces.append(b"%x%s\r\n%s\r\n" % (len(piece), rng.choice([b"", b";a=b"]), piece))
        at += size
    return b"".join(pieces) + b"0\r\n" + rng.choice([b"", b"Trailer: x\r\n"]) + b"\r\n"


def _body_for(address: tuple[str, str], rng: random.Random) -> bytes:
    if address[1].endswith("drawing"):
        return drawing()
    return picture(rng.choice(["PNG", "JPEG", "WEBP", "GIF", "BMP"]), rng.choice(["L", "RGB", "P", "RGBA"]))


def _odd_body(rng: random.Random) -> bytes:
    kind = rng.randrange(9)
    if kind == 0:
        return rng.choice([b"", b"\x00", b"null", b"\xff\xfe{}", b'{"a":1,"a":2}', b"[" * 10_000, b'{"a":' * 5_000])
    if kind == 1:
        return json.dumps({"seed": rng.choice(_ODD_VALUES), "image": [None] * rng.randrange(200), MARK: MARK}).encode()
    if kind == 2:
        part = b'--x\r\nContent-Disposition: form-data; name="f"; filename="../../%s"\r\n\r\n' % MARK.encode()
        return part + picture("PNG", "L") + rng.choice([b"\r\n--x--\r\n", b"\r\n--x", b""])
    if kind == 3:
        return rng.randbytes(rng.choice([1, 10, 280 * 280 - 1, 280 * 280, 280 * 280 + 1, 100_000]))
    whole = picture(rng.choice(["PNG", "JPEG", "WEBP", "GIF", "BMP"]), rng.choice(["L", "RGB", "P", "RGBA"]))
    if kind == 4:
        return whole[: rng.randrange(len(whole))]
    damaged = bytearray(whole)
    for _ in range(rng.choice([1, 3, 30])):
        at = rng.randrange(min(len(damaged), 80 if kind == 5 else len(damaged)))
        damaged[at] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
    return bytes(damaged)


@functools.cache
def drawing() -> bytes:
    """A slanted stroke on the page's canvas."""
    ink = np.zeros((280, 280), np.uint8)
    for k in range(180):
        ink[50 + k, 90 + k // 3 : 112 + k // 3] = 255
    return ink.tobytes()


@functools.cache
def picture(form: str, mode: str, side: int = 60) -> bytes:
    """A dark stroke on light paper in one of the formats that are read."""
    if form in ("JPEG", "BMP") and mode in ("P", "RGBA"):
        mode = "RGB"
    image = Image.new("L", (side, side), 255)
    image.paste(0, (side // 2 - side // 12, side // 6, side // 2 + side // 12, side - side // 6))
    buffer = io.BytesIO()
    image.convert(mode).save(buffer, form)
    return buffer.getvalue()
