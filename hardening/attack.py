"""The explorer under attack: ``dropmax explore`` as a process of its own on loopback, and everything thrown at it.

While each attack goes on, a witness asks ordinary questions on connections of its own: it must be answered, and in
time. The server's memory is its own peak as the kernel counts it. After its start the server has nothing to say on
standard error: a line there is a bug that showed. The numbers that are promised stand in ``attack_server.py``.
"""

from __future__ import annotations

import random
import re
import resource
import struct
import threading
import time
import zlib
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from dropmax.errors import RunError
from dropmax.workbench.progress import progress
from hardening import attack_wire as wire
from hardening.attack_requests import RIGHT, SCHEMA, drawing, make_request, picture, request
from hardening.attack_server import OPEN_FILES, OTHERS_WAIT, Witness, serving, spread
from hardening.campaign import Outcome

#: A request that takes longer than 30 seconds is cut; the rest is the slack of a busy machine.
CUT_WITHIN = 40.0
# fmt: off
FOREIGN_HOSTS = [
    "evil.example", "evil.example:8765", "127.0.0.1.evil.example", "localhost.evil.example", "127.0.0.1@evil.example",
    "localhost:8765/evil", "127.0.0.1,evil.example", "192.168.0.7", "0.0.0.0", "127.1", "2130706433", "0x7f.1", "[::2]",
    "[::1", "", "*", "127.0.0.1:99999999", "localhost.",
]
FOREIGN_PAGES = [
    "Origin: http://evil.example", "Origin: null", "Origin: http://127.0.0.1:9", "Origin: http://localhost",
    "Origin: http://127.0.0.1.evil.example", "Origin: file://", "Origin: ",
    "Sec-Fetch-Site: cross-site", "Sec-Fetch-Site: same-site",
]
# fmt: on


def run(*, short: bool, seed: int, scratch: Path) -> Outcome:
    """Attack one server in every way, one after the other."""
    if not hasattr(resource, "prlimit"):
        raise RunError("the campaign 'attack' reads the server's memory from /proc: it needs Linux")
    outcome = Outcome()
    _allow_open_files(4096)
    patience = 4 * OTHERS_WAIT if short else OTHERS_WAIT  # the short form runs beside other tests
    with serving(scratch) as server, Witness(server.place, outcome, patience) as witness:
        place = server.place
        with witness.during("fuzz"):
            fuzz(place, outcome, seed, 200 if short else 20_000)
        with witness.during("foreign"):
            foreign(place, outcome, seed, 10 if short else 1_000)
        with witness.during("oversized"):
            oversized(place, outcome, 1_000_000 if short else 24_000_000, 2 if short else 8)
        with witness.during("slow"):
            slow(place, outcome, 30 if short else 200, hold=1.0 if short else CUT_WITHIN, until_cut=not short)
        with witness.during("flood"):
            flood(place, outcome, 600 if short else 2 * OPEN_FILES, hold=0.5 if short else 5.0)
        with witness.during("crowd"):
            outcome.details["crowd"] = crowd(place, outcome, 50, 1.0 if short else 60.0)
        witness.report()
        server.report(outcome)
    server.report_end(outcome)
    return outcome


# --- the attacks -----------------------------------------------------------------------------------------------------


def fuzz(place: wire.Place, outcome: Outcome, seed: int, number: int) -> None:
    """Send requests wrong in a place or two to every address; each has one polite answer, or is cut where it lies."""
    seen: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)

    def one(case: int) -> tuple[tuple[str, str], str, str | None]:
        request = make_request(seed, case)
        kind, complaint = wire.judge(request, wire.exchange(place, request.sent, half_close=not request.well_formed))
        return request.address, kind, complaint

    with ThreadPoolExecutor(8) as pool, progress("fuzzing the explorer", number, "requests") as advance:
        for case, (address, kind, complaint) in enumerate(pool.map(one, range(number))):
            seen[address][kind] += 1
            outcome.count(kind)
            if complaint:
                outcome.fail(f"fuzz: make_request({seed}, {case}) to {' '.join(address)}: {complaint}")
            advance(1)
    outcome.details["fuzz"] = {" ".join(address): dict(sorted(seen[address].items())) for address in SCHEMA}
    for address in SCHEMA:
        if not seen[address]["200"]:
            outcome.fail(f"fuzz: {' '.join(address)} was never reached by a right request")


def foreign(place: wire.Place, outcome: Outcome, seed: int, number: int) -> None:
    """Ask under names that are not ours (DNS rebinding) and from pages that are not ours; all of it is refused."""
    rng = random.Random(seed)
    ours = f"Host: 127.0.0.1:{place[1]}\r\n"
    heads = [f"Host: {host}" for host in FOREIGN_HOSTS] + ["Host: 127.0.0.1\r\nHost: evil.example", "X-No-Host: at all"]
    cases = [(address, head, {400, 421}) for head in heads for address in SCHEMA]
    # A link from elsewhere may open the page; nothing else may be asked for by another page.
    cases += [(address, ours + page, {403}) for page in FOREIGN_PAGES for address in SCHEMA if address[1] != "/"]
    for _ in range(number):
        name = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789.-:[]", k=rng.randint(1, 30)))
        if not re.fullmatch(r"localhost(:\d+)?|127\.\d+\.\d+\.\d+(:\d+)?|\[[:0]*:0*1\](:\d+)?", name):
            cases.append((rng.choice(list(SCHEMA)), f"Host: {name}", {400, 421}))

    def one(case: tuple[tuple[str, str], str, set[int]]) -> list[int]:
        (method, path), head, _ = case
        sent = request(method, path.format(index=1, name="main.js"), drawing() if method == "POST" else b"")
        raw = wire.exchange(place, sent.replace(b"Host: 127.0.0.1", head.encode(), 1))
        return [answer.status for answer in wire.read_answers(raw)]

    with ThreadPoolExecutor(8) as pool, progress("foreign names and pages", len(cases), "requests") as advance:
        for (address, head, refusals), statuses in zip(cases, pool.map(one, cases), strict=True):
            refused = len(statuses) == 1 and statuses[0] in refusals
            outcome.count("foreign refused" if refused else "foreign ANSWERED")
            if not refused:
                outcome.fail(f"foreign: {' '.join(address)} with {head!r} was answered {statuses}")
            advance(1)


def oversized(place: wire.Place, outcome: Outcome, pixels: int, at_once: int) -> None:
    """Send bodies over every limit, endless ones, and small files of very many pixels, several at once."""
    side = int(pixels**0.5)
    bombs = [picture("PNG", mode, side) for mode in ("1", "L", "RGBA")] + [picture("JPEG", "RGB", side)]
    claims = [_png_that_claims(width, height) for width, height in ((65_000, 65_000), (2**31 - 1, 1), (4000, 7000))]
    cases: list[tuple[str, bytes, set[int]]] = []
    for prepare in ("none", "mnist"):
        cases += [(prepare, _post(prepare, bomb), {200, 422}) for bomb in bombs]
        cases += [(prepare, _post(prepare, claim), {422}) for claim in claims]
        cases.append((prepare, _post(prepare, bytes(11 * 2**20)), {413}))
        cases.append((prepare, _post(prepare, b"x", length=10**30), {413, 400}))
        cases.append((prepare, _post(prepare, (b"100000\r\n" + bytes(2**20) + b"\r\n") * 30, chunked=True), {413}))
    with ThreadPoolExecutor(at_once) as pool, progress("oversized uploads", len(cases), "uploads") as advance:
        for (prepare, sent, expected), raw in zip(
            cases, pool.map(lambda c: wire.exchange(place, c[1]), cases), strict=True
        ):
            statuses = {answer.status for answer in wire.read_answers(raw)}
            # Whoever is still sending when the refusal comes may find the connection reset before reading it.
            cut = not statuses and expected == {413}
            outcome.count("oversized " + ("cut" if cut else "/".join(map(str, sorted(statuses))) or "UNANSWERED"))
            if not cut and not (statuses and statuses <= expected):
                outcome.fail(
                    f"oversized: {len(sent):,} bytes, prepare={prepare}, starting {sent[-40:][:8]!r}: {statuses}"
                )
            advance(1)


def slow(place: wire.Place, outcome: Outcome, number: int, *, hold: float, until_cut: bool) -> None:
    """Hold connections open with headers and bodies that dribble and readers that never read; each is cut in time."""
    post = b"POST /api/try/image HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/octet-stream\r\n"
    openings = {
        "silence": b"",
        "slow headers": b"GET /api/about HTTP/1.1\r\nHost: 127.0.0.1\r\nX-",
        "slow body": post + b"Content-Length: 5000\r\n\r\nabc",
        "slow chunks": post + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n",
        "never reads": b"GET /static/style.css HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 500,
    }
    dribble = {"slow headers": b"a", "slow body": b"b", "slow chunks": b"1\r\nb\r\n"}
    held = [
        (kind, wire.connect(place, small=kind == "never reads")) for kind in list(openings) * (number // len(openings))
    ]
    for kind, connection in held:
        wire.send_quietly(connection, openings[kind])
    start = time.monotonic()
    open_still = dict(enumerate(held))
    with progress("slow connections", len(held), "cut") as advance:
        while open_still and time.monotonic() - start < hold:
            for place_in_line, (kind, connection) in list(open_still.items()):
                wire.send_quietly(connection, dribble.get(kind, b""))
                if wire.is_cut(connection, reads=kind != "never reads"):
                    del open_still[place_in_line]
                    outcome.count(f"{kind}: cut")
                    advance(1)
            time.sleep(0.5)
    for kind, _ in open_still.values():
        outcome.count(f"{kind}: held")
        if until_cut:
            outcome.fail(f"slow: a connection ({kind}) was still open after {hold:.0f} s")
    for _, connection in held:
        connection.close()


def flood(place: wire.Place, outcome: Outcome, number: int, *, hold: float) -> None:
    """Open more connections than the server may have files, say nothing, and hold them."""
    held = [connection for _ in range(number) if (connection := wire.connect_quietly(place)) is not None]
    outcome.count("flood: connected", len(held))
    if len(held) < number:
        outcome.count("flood: refused", number - len(held))
    time.sleep(hold)
    for connection in held:
        connection.close()


def crowd(place: wire.Place, outcome: Outcome, clients: int, seconds: float) -> dict[str, Any]:
    """Let many clients ask ordinary things at once, as fast as they are answered; every one is served."""
    waits: list[list[float]] = [[] for _ in range(clients)]
    wrong: list[str] = []
    until = time.monotonic() + seconds
    large = picture("JPEG", "RGB", 2000)

    def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < until:
            method, path = rng.choice(list(SCHEMA))
            body = b"" if method == "GET" else drawing() if path.endswith("drawing") else large
            for name in SCHEMA[method, path]:
                path = path.replace(f"{{{name}}}", RIGHT[name](rng))
            start = time.monotonic()
            answers = wire.read_answers(wire.exchange(place, request(method, path, body)))
            waits[number].append(time.monotonic() - start)
            if [answer.status for answer in answers] != [200]:
                wrong.append(f"crowd: {method} {path}: {answers or 'no answer'}"[:200])

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    with progress("a crowd", round(seconds), "seconds") as advance:
        while time.monotonic() < until:
            time.sleep(min(1.0, max(0.01, until - time.monotonic())))
            advance(1)
    for thread in threads:
        thread.join()
    every = np.concatenate([np.asarray(one) for one in waits])
    outcome.count("crowd: answered", len(every) - len(wrong))
    if wrong:
        outcome.count("crowd: WRONG", len(wrong))
    for line in wrong:
        outcome.fail(line)
    if min(map(len, waits)) == 0:
        outcome.fail("crowd: a client was never answered")
    return {"clients": clients, "seconds": seconds, "requests": len(every), "waits": spread(every)}


# --- bits ------------------------------------------------------------------------------------------------------------


def _post(prepare: str, body: bytes, *, length: int | None = None, chunked: bool = False) -> bytes:
    sent = request("POST", f"/api/try/image?prepare={prepare}", body)
    said = b"Content-Length: %d" % len(body)
    told = (
        b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % (len(body) if length is None else length)
    )
    return sent.replace(said, told, 1)


def _png_that_claims(width: int, height: int) -> bytes:
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body)) + bytes(64)


def _allow_open_files(number: int) -> None:
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now != resource.RLIM_INFINITY and now < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(number, most) if most >= 0 else number, most))
