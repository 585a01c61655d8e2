"""Malformed files of every kind that is read: each is read or refused with our error, in bounded time and memory.

The number of a case and its kind decide the file: ``Random(f"{kind}/{number}")`` makes it again.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dropmax.errors import DropMaxError
from dropmax.lab.experiments import Store, make_table, plan_study
from dropmax.lab.experiments.render import FORMATS
from dropmax.workbench.training import RunDirectory
from tests.command import ROUNDS
from tests.slow import malformed, malformed_runs

resource = pytest.importorskip("resource", reason="measures memory as POSIX does")
SECONDS, MEMORY = 5.0, 1 << 30  #: of processor time and of additional memory, per file


def read_log(run: RunDirectory) -> object:
    return run.metrics(), run.environment()


def render_results(store: Store) -> object:
    """Make the tables in every format, as ``dropmax reproduce --only-tables`` does."""
    table = make_table(store)
    return [render([table]) for render in FORMATS.values()]


#: How a file is made, how it is read, and how many are tried in the short form.
KINDS: dict[str, tuple[Callable[[Random, Path], None], Callable[[Path], object], int]] = {
    "idx": (malformed.make_mnist, malformed.read_mnist_files, 30),
    "cifar": (malformed.make_cifar, malformed.read_cifar, 20),
    "cub": (malformed.make_cub, malformed.read_cub, 30),
    "archive": (malformed.make_archive, malformed.read_archive, 15),
    "image": (malformed.make_image, malformed.read_image, 45),
    "npz": (malformed.make_npz, malformed.read_table, 30),
    "csv": (malformed.make_csv, malformed.read_table, 30),
    "parquet": (malformed.make_parquet, malformed.read_table, 25),
    "recipe": (malformed_runs.make_recipe, malformed_runs.read_recipe, 20),
    "study": (malformed_runs.make_study, lambda at: plan_study(at / "a.toml"), 10),
    "checkpoint": (malformed_runs.make_checkpoint, malformed_runs.read_checkpoint, 15),
    "model": (malformed_runs.make_model, malformed_runs.read_model, 10),
    "log": (malformed_runs.make_log, lambda at: read_log(RunDirectory.open(at)), 10),
    "results": (malformed_runs.make_results, lambda at: render_results(Store(at)), 10),
}
#: Small files of very many numbers, or that claim to be: their kind and name, and how each is made.
BOMBS: list[tuple[str, str, Callable[..., bytes], tuple[Any, ...]]] = [
    *[("idx", "images", malformed.gzip_of_zeros, (images,)) for images in (60_000, 340_000, 2**31)],
    *[("image", "a.png", malformed.png_of_zeros, (9400, 9400, how)) for how in ("colour", "palette", "grey")],
    ("image", "a.png", malformed.png_of_zeros, (40_000, 40_000)),
    *[("npz", "a.npz", malformed.npz_of_zeros, (rows, 1000)) for rows in (16_000, 480_000, 10**9)],
]


def read_or_refuse(read: Callable[[Path], object], folder: Path, what: str) -> bool:
    """Return whether the file was refused; fail where reading it takes too long or too much, or ends in a traceback."""
    memory, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        read(folder)
        said = None
    except DropMaxError as error:
        said = str(error).strip()
    except Exception as error:
        raise AssertionError(f"{what} ended in {error!r}") from error
    assert said != "", f"{what} was refused without a word"
    assert time.process_time() - started < SECONDS, f"{what} was slow"
    taken = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory)
    assert taken < MEMORY, f"{what} took {taken / 1e6:.0f} MB"
    return said is not None


@pytest.mark.filterwarnings("error::RuntimeWarning")  # a number that silently became another
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_malformed_file_is_read_or_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROPMAX_CACHE", str(tmp_path / "cache"))
    make, read, count = KINDS[kind]
    refused = 0
    for number in range(count * ROUNDS):
        folder = tmp_path / "case"
        folder.mkdir()
        make(Random(f"{kind}/{number}"), folder)
        refused += read_or_refuse(read, folder, f"case {number} of {kind}")
        shutil.rmtree(folder)
    assert refused, "nothing was damaged"


@pytest.mark.parametrize(("kind", "name", "make", "arguments"), BOMBS)
def test_a_bomb_is_read_or_refused(
    kind: str, name: str, make: Callable[..., bytes], arguments: tuple[Any, ...], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(make(*arguments))
    if kind == "idx":
        (tmp_path / "labels").write_bytes(malformed.gzip_of_zeros(10, dimensions=1))
    read_or_refuse(KINDS[kind][1], tmp_path, f"{kind} of {arguments}")
