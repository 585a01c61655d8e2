"""Processes with a life of their own: forked from one that has torch loaded already, killed at a given moment.

A fork costs milliseconds where a new Python with torch costs seconds, and a kill is the same to it: ``SIGKILL`` cannot
be caught, and nothing of the process runs after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dropmax.errors import DropMaxError

#: No work of a campaign takes longer; one that does hangs.
SECONDS_AT_MOST = 300.0


@dataclass(frozen=True)
class Life:
    """How the work of a process went."""

    seconds: float
    kills: int = 0  #: processes we killed: this one, or one of its children
    done: bool = False  #: whether the work came to its end
    error: str = ""  #: what it raised, or whatever else went wrong; empty where it was killed
    ours: bool = False  #: whether the error is one of the package's own classes


def live(work: Callable[[], None], *, kill_after: float | None = None, victim: str = "") -> Life:
    """Do some work in a process of its own, and kill it after so many seconds if it is not done by then.

    ``victim`` names a process to kill in its stead: a child of it whose command line contains that text, where it has
    one at that moment. The work then goes on.
    """
    with tempfile.TemporaryFile() as message:
        start = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _child(work, message.fileno())
        kills = 0
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            elapsed = time.monotonic() - start
            if ended:
                break
            if elapsed > SECONDS_AT_MOST:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return Life(elapsed, kills, error=f"it was not done after {elapsed:.0f} seconds")
            if kill_after is not None and not kills and elapsed >= kill_after:
                children = [child for child in children_of(pid) if victim and victim in command_of(child)]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(children[0] if children else pid, signal.SIGKILL)
                    kills = 1
            else:
                time.sleep(0.002)
        if kills and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return Life(elapsed, kills)
        message.seek(0)
        said = message.read()
        if not said:
            return Life(elapsed, kills, error=f"it died with status {os.waitstatus_to_exitcode(status)}")
        error, ours = json.loads(said)
        return Life(elapsed, kills, done=not error, error=error, ours=ours)


def _child(work: Callable[[], None], message: int) -> None:
    """Do the work, say how it went, and leave without any of the parent's business at exit."""
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        try:
            work()
            said = ("", False)
        except BaseException as error:
            said = (f"{type(error).__name__}: {error}", isinstance(error, DropMaxError))
        os.write(message, json.dumps(said).encode())
    finally:
        os._exit(0)


def children_of(pid: int) -> list[int]:
    """Return the children of a process, as /proc knows them."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended while we looked
            if int(place.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(place.parent.name))
    return found


def command_of(pid: int) -> str:
    """Return the command line of a process, empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
