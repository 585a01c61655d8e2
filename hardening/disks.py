"""A disk that is full: a small tmpfs where we may mount one, else a limit to the size of files."""

from __future__ import annotations

import contextlib
import functools
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hardening.campaign import Outcome
from hardening.lives import live

if TYPE_CHECKING:
    from hardening.kills import Target

_PLENTY = 256 * 2**20


def fill_the_disk(
    target: Target,
    place: Path,
    number: int,
    rng: random.Random,
    outcome: Outcome,
    contents: Callable[[Path], dict[str, bytes]],
    torn: Callable[[Path], list[str]],
) -> None:
    """Work on disks of random sizes, none large enough; then make room, go on, and compare with a run in peace.

    On the full disk the work must end in an error of ours, and leave neither half a file nor a temporary one.
    """
    from hardening.kills import differences

    place.mkdir()
    with small_disk(place) as (disk, how):
        outcome.details["full disk"] = how.description
        how.resize(_PLENTY)
        whole = live(functools.partial(target.work, disk / "reference"))
        expected = contents(disk / "reference")
        need = how.need(disk / "reference")
        shutil.rmtree(disk / "reference")
        if not whole.done:
            outcome.count("wrong on a disk with room")
            outcome.fail(f"{target.name}: on {how.description} with room enough, {whole.error}")
        for _ in range(number):
            run = disk / "run"
            size = int(need * rng.uniform(0.02, 0.98))
            how.resize(size)
            life = live(how.limited(functools.partial(target.work, run)))
            outcome.count(f"{target.name}: disk full" if life.error else f"{target.name}: disk just large enough")
            problems = [] if life.done or life.ours else [f"it ended in {life.error or 'nothing'}"]
            problems += torn(run) + [f"{path.name} was left behind" for path in run.rglob(".*.tmp")]
            how.resize(_PLENTY)
            life = live(functools.partial(target.work, run))
            problems += differences(contents(run), expected) if life.done else [f"with room again: {life.error}"]
            outcome.count("ended in other bytes" if problems else "ended in the same bytes")
            for line in problems:
                outcome.fail(f"{target.name}: disk of {size} bytes ({how.description}): {line}")
            shutil.rmtree(run, ignore_errors=True)
    shutil.rmtree(place)


class Tmpfs:
    """A file system in memory, of the size we say."""

    description = "a small tmpfs"

    def __init__(self, place: Path) -> None:
        self.place = place

    def resize(self, size: int) -> None:
        """Make it larger or smaller."""
        options = f"remount,size={max(size, 4096)}"
        subprocess.run(["mount", "-o", options, str(self.place)], check=True, capture_output=True)

    def need(self, place: Path) -> int:
        """Return what the files of a directory need, in whole pages."""
        return sum(-(-path.stat().st_size // 4096) * 4096 for path in place.rglob("*") if path.is_file())

    def limited(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return work that feels the limit: on this disk, any."""
        return work


class SizeLimit:
    """``RLIMIT_FSIZE`` for the process and its children: a file that grows beyond it fails as on a full disk."""

    description = "a limit to the size of each file (RLIMIT_FSIZE), as no tmpfs could be mounted"

    def __init__(self) -> None:
        self.size = _PLENTY

    def resize(self, size: int) -> None:
        """Set the limit of what is started from now on."""
        self.size = size

    def need(self, place: Path) -> int:
        """Return the size of the largest file."""
        return max(path.stat().st_size for path in place.rglob("*") if path.is_file())

    def limited(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return work that feels the limit."""

        def limited() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.size))
            work()

        return limited


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[tuple[Path, Tmpfs | SizeLimit]]:
    """Mount a tmpfs at ``place``; where that is not allowed, return the directory and a limit instead."""
    try:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        yield place, SizeLimit()
        return
    try:
        yield place, Tmpfs(place)
    finally:
        subprocess.run(["umount", str(place)], check=True, capture_output=True)
