"""Raw connections to a server, and whether an answer is one the explorer may give."""

from __future__ import annotations

import json
import select
import socket
from dataclasses import dataclass

from dropmax.lab.explorer.guard import HEADERS
from hardening.attack_requests import MARK, Wire

Place = tuple[str, int]

#: Nobody waits longer than this for an answer, or for the end of one.
PATIENCE = 30.0
#: What a request that HTTP understands may come to, and what others may.
ANSWERS = {200, 404, 405, 409, 413, 415, 422}
REFUSALS = ANSWERS | {400, 403, 408, 421}
MOST_ANSWER = 4_000_000


@dataclass(frozen=True)
class Answer:
    """One response, taken apart."""

    status: int
    headers: dict[str, str]
    body: bytes


def connect(place: Place, *, small: bool = False) -> socket.socket:
    """Open a connection; a ``small`` one takes in little before the sender must wait."""
    connection = socket.socket()
    if small:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(PATIENCE)
    try:
        connection.connect(place)
    except OSError:
        connection.close()
        raise
    return connection


def connect_quietly(place: Place) -> socket.socket | None:
    """Open a connection, or None where it is refused."""
    try:
        return connect(place)
    except OSError:
        return None


def exchange(place: Place, sent: bytes, *, half_close: bool = False) -> bytes | None:
    """Send bytes and return all that comes until the other side closes; None where it does not in time."""
    answer = b""
    try:
        with connect(place) as connection:
            try:
                connection.sendall(sent)
                if half_close:
                    connection.shutdown(socket.SHUT_WR)
            except (BrokenPipeError, ConnectionResetError):
                pass  # it was refused half-way; what was said may still be read
            while chunk := connection.recv(65536):
                answer += chunk
    except TimeoutError:
        return None
    except OSError:
        pass
    return answer


def send_quietly(connection: socket.socket, content: bytes) -> None:
    """Send what goes out at once; whatever happens is found out by reading."""
    try:
        connection.settimeout(0)
        connection.send(content)
    except OSError:
        pass


def is_cut(connection: socket.socket, *, reads: bool) -> bool:
    """Return whether the other side closed the connection; where nothing is read, only a reset is noticed."""
    if not reads:
        return connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0 or _has_hung_up(connection)
    try:
        connection.settimeout(0)
        while chunk := connection.recv(65536):
            del chunk
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


def _has_hung_up(connection: socket.socket) -> bool:
    watch = select.poll()
    watch.register(connection, 0)  # hanging up is always told
    return bool(watch.poll(0))


def read_answers(raw: bytes | None, *, head_only: bool = False) -> list[Answer]:
    """Take apart what came; what is no HTTP becomes an answer with the status 0."""
    answers: list[Answer] = []
    rest = raw or b""
    while rest:
        head, found, rest = rest.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ", 2)
        if not found or words[0] != "HTTP/1.1" or len(words) < 2 or not words[1].isdecimal():
            return [*answers, Answer(0, {}, head)]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        if words[1] == "100":
            continue
        # An answer to HEAD has no body, unless the request was so wrong that nobody knew it was HEAD.
        length = 0 if head_only and words[1] != "400" else int(headers.get("content-length", len(rest)))
        if len(rest) < length:
            return [*answers, Answer(0, headers, rest)]
        answers.append(Answer(int(words[1]), headers, rest[:length]))
        rest = rest[length:]
    return answers


def judge(request: Wire, raw: bytes | None) -> tuple[str, str | None]:
    """Return what became of a request, in a word, and what is wrong with that, if anything is."""
    if raw is None:
        return "NO ANSWER", f"no answer and no end in {PATIENCE:.0f} s"
    answers = read_answers(raw, head_only=request.head_only)
    if not answers:
        return "cut", "the connection was closed without an answer" if request.well_formed else None
    first = answers[0]
    for answer in answers:
        complaint = _complaint(answer, request)
        if complaint:
            return str(answer.status), complaint
    return str(first.status), None


def _complaint(answer: Answer, request: Wire) -> str | None:
    said = f"{answer.status}: {answer.body[:120]!r}"
    if answer.status not in (ANSWERS if request.well_formed else REFUSALS):
        return f"answered {said}"
    for name in HEADERS:
        if name not in answer.headers:
            return f"no {name} in the answer {said}"
    for name in answer.headers:
        if name.startswith("access-control") or name in ("set-cookie", "server"):
            return f"{name} in the answer {said}"
    if len(answer.body) > MOST_ANSWER:
        return f"an answer of {len(answer.body):,} bytes"
    if MARK.encode() in answer.body:
        return f"what was sent is repeated in {said}"
    if b"Traceback" in answer.body:
        return f"a traceback in {said}"
    if request.head_only:
        return None
    if answer.status != 200:
        return _politeness(answer.body)
    if answer.headers.get("content-type") == "application/json":
        try:
            json.loads(answer.body, parse_constant=_refuse)
        except ValueError as error:
            return f"JSON that is none ({error}) in {said}"
    return None


def _politeness(body: bytes) -> str | None:
    try:
        content = json.loads(body)
    except ValueError:
        return f"a refusal that is not JSON: {body[:120]!r}"
    if not isinstance(content, dict) or list(content) != ["error"] or not str(content["error"]).endswith("."):
        return f"a refusal that is not one sentence: {body[:120]!r}"
    return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
