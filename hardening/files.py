"""Malformed files: whatever is in one, a reader ends in success or in an error of ours, in bounded time and memory.

Every case has a number; it and the seed decide the file, so that ``replay(number, seed, folder)`` makes it again.
Cases run in a forked process that tells of each beginning and end, so that a crash or a hang has a number, too.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import select
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

from dropmax.errors import DropMaxError
from dropmax.workbench.progress import progress
from hardening import data_files, image_files, run_files, table_files
from hardening.campaign import Outcome

__all__ = ["KINDS", "Kind", "attempt", "replay", "run", "try_cases"]

#: Seconds of processor time a file may take, and bytes of memory beyond what the process had.
SECONDS, MEMORY = 5.0, 1 << 30
#: A case that takes so long is called a hang, and its process is killed. Other work may slow a sound one down.
PATIENCE = 120.0
#: An allocation may fail rather than bring the machine down.
ADDRESS_SPACE = 8 << 30
#: Cases a process does before a fresh one takes over.
BATCH = 5000

Kind = tuple[int, Callable[[Random, Path], None], Callable[[Path], object]]

#: What is read: its share of the cases, how a file is made, and how it is read.
KINDS: dict[str, Kind] = {
    "idx": (10, data_files.make_mnist, data_files.read_mnist_files),
    "cifar": (7, data_files.make_cifar, data_files.read_cifar),
    "cub": (9, data_files.make_cub, data_files.read_cub),
    "archive": (5, data_files.make_archive, data_files.read_archive),
    "image": (15, image_files.make_image, image_files.read_image),
    "npz": (11, table_files.make_npz, table_files.read_table),
    "csv": (10, table_files.make_csv, table_files.read_table),
    "parquet": (8, table_files.make_parquet, table_files.read_table),
    "recipe": (7, run_files.make_recipe, run_files.read_recipe),
    "study": (3, run_files.make_study, run_files.read_study),
    "checkpoint": (5, run_files.make_checkpoint, run_files.read_checkpoint),
    "model": (3, run_files.make_model, run_files.read_model),
    "log": (3, run_files.make_log, run_files.read_log),
    "results": (4, run_files.make_results, run_files.read_results),
}


def run(*, short: bool, seed: int, scratch: Path) -> Outcome:
    """Read 100,000 malformed files, or 300."""
    cases = 300 if short else 100_000
    outcome = Outcome(details={"seconds allowed": SECONDS, "bytes allowed": MEMORY, "by kind": {}})
    with progress("reading malformed files", cases, "files") as advance:
        try_cases(outcome, cases, seed, scratch, KINDS, advance)
    return outcome


def replay(number: int, seed: int, folder: Path, kinds: dict[str, Kind] = KINDS) -> tuple[str, object]:
    """Make the file of a case in a new folder and read it here, raising what it raises; return its kind and the answer.

    ``python -c "from pathlib import Path; from hardening.files import replay; replay(7, 0, Path('case'))"``
    """
    rng = Random(f"{seed}/{number}")
    (name,) = rng.choices(list(kinds), [share for share, _, _ in kinds.values()])
    folder.mkdir(parents=True)
    kinds[name][1](rng, folder)
    return name, kinds[name][2](folder)


def attempt(number: int, seed: int, folder: Path, kinds: dict[str, Kind]) -> str:
    """Do a case and return a line about it: kind, what became of it, seconds, bytes, and what was wrong."""
    shutil.rmtree(folder, ignore_errors=True)
    rng = Random(f"{seed}/{number}")
    (name,) = rng.choices(list(kinds), [share for share, _, _ in kinds.values()])
    folder.mkdir(parents=True)
    kinds[name][1](rng, folder)
    Path("/proc/self/clear_refs").write_text("5")  # begin to measure the peak anew
    before, started = _memory(), time.process_time()
    became, wrong = "read", ""
    try:
        kinds[name][2](folder)
    except DropMaxError as error:
        became = "refused"
        wrong = "" if str(error).strip() else f"an error without a word, {type(error).__name__}"
    except BaseException as error:
        became = "other error"
        place = traceback.extract_tb(error.__traceback__)[-1]
        wrong = f"{type(error).__name__} at {place.filename.rpartition('/')[2]}:{place.lineno}: {str(error)[:200]!r}"
    seconds, taken = time.process_time() - started, _memory() - before
    if seconds > SECONDS:
        became, wrong = "too slow", f"{wrong} after {seconds:.1f} s"
    if taken > MEMORY:
        became, wrong = "too large", f"{wrong} with {taken / 1e6:,.0f} MB"
    return f"{name}\t{became}\t{seconds:.6f}\t{max(0, taken)}\t{' '.join(wrong.split())}"


def _memory() -> int:
    """Return the most memory this process had since the last reset, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def try_cases(
    outcome: Outcome, cases: int, seed: int, scratch: Path, kinds: dict[str, Kind], advance: Callable[[int], None]
) -> None:
    """Do the cases 0, 1, ... in processes of their own, and count what became of them."""
    torch.set_num_threads(1)
    os.environ["DROPMAX_CACHE"] = str(scratch / "cache")
    number = 0
    while number < cases:
        number = _batch(outcome, number, min(number + BATCH, cases), seed, scratch, kinds, advance)
    for line in outcome.details["by kind"].values():
        line["seconds"], line["most seconds"] = round(line["seconds"], 1), round(line["most seconds"], 3)


def _batch(
    outcome: Outcome,
    first: int,
    end: int,
    seed: int,
    scratch: Path,
    kinds: dict[str, Kind],
    advance: Callable[[int], None],
) -> int:
    """Do cases in one forked process; return the case after the last that ended, one way or the other."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        _work(writing, first, end, seed, scratch / "case", kinds)
        os._exit(0)
    os.close(writing)
    number, text = first, b""
    deadline = time.monotonic() + PATIENCE
    try:
        while number < end:
            ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
            block = os.read(reading, 1 << 16) if ready else b""
            if not block:
                os.kill(process, signal.SIGKILL)  # where it died by itself, this does nothing to what it died of
                _, status = os.waitpid(process, 0)
                became = f"killed by signal {os.WTERMSIG(status)}" if not ready or os.WIFSIGNALED(status) else "ended"
                kind = "hang" if not ready else "crash"
                _count(outcome, number, seed, f"{_kind(number, seed, kinds)}\t{kind}\t0\t0\tthe process was {became}")
                process = 0
                advance(1)
                return number + 1
            *lines, text = (text + block).split(b"\n")
            for line in lines:
                _count(outcome, number, seed, line.decode(errors="replace"))
                number += 1
            deadline = time.monotonic() + PATIENCE
            advance(len(lines))
    finally:
        os.close(reading)
        if process:
            os.waitpid(process, 0)
    return number


def _work(writing: int, first: int, end: int, seed: int, folder: Path, kinds: dict[str, Kind]) -> None:
    """Be the process that reads: quiet, limited, and telling of every case that ended."""
    try:
        faulthandler.disable()  # a crash is told by the parent, in one line
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE, used + ADDRESS_SPACE))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RuntimeWarning)  # a number that silently became another
        for number in range(first, end):
            os.write(writing, attempt(number, seed, folder, kinds).encode(errors="replace") + b"\n")
    except BaseException:
        os._exit(1)


def _kind(number: int, seed: int, kinds: dict[str, Kind]) -> str:
    return Random(f"{seed}/{number}").choices(list(kinds), [share for share, _, _ in kinds.values()])[0]


def _count(outcome: Outcome, number: int, seed: int, line: str) -> None:
    kind, became, seconds, taken, wrong = line.split("\t", 4)
    outcome.count(became)
    if became not in ("read", "refused") or wrong:
        outcome.fail(f"case {number} of seed {seed}, {kind}: {became}: {wrong}")
    found = outcome.details.setdefault("by kind", {}).setdefault(
        kind, {"files": 0, "read": 0, "refused": 0, "seconds": 0.0, "most seconds": 0.0, "most bytes": 0}
    )
    found["files"] += 1
    if became in found:
        found[became] += 1
    found["seconds"] += float(seconds)
    found["most seconds"] = max(found["most seconds"], float(seconds))
    found["most bytes"] = max(found["most bytes"], int(taken))
