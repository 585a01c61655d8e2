"""Malformed files of every kind that is read: each is read or refused with our error, in bounded time and memory.

The number of a case and its kind decide the file: ``Random(f"{kind}/{number}")`` makes it again.
"""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from dropmax.errors import DropMaxError
from tests.command import ROUNDS
from tests.slow import malformed, malformed_runs

SECONDS, MEMORY = 5.0, 1 << 30  #: of processor time and of additional memory, per file

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
    "study": (malformed_runs.make_study, malformed_runs.read_study, 10),
    "checkpoint": (malformed_runs.make_checkpoint, malformed_runs.read_checkpoint, 15),
    "model": (malformed_runs.make_model, malformed_runs.read_model, 10),
    "log": (malformed_runs.make_log, malformed_runs.read_log, 10),
    "results": (malformed_runs.make_results, malformed_runs.read_results, 10),
}


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
        memory, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        try:
            read(folder)
        except DropMaxError as error:
            refused += bool(str(error).strip()) or pytest.fail(f"case {number} of {kind} was refused without a word")
        except Exception as error:
            raise AssertionError(f"case {number} of {kind} ended in {error!r}") from error
        assert time.process_time() - started < SECONDS, f"case {number} of {kind} was slow"
        taken = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory)
        assert taken < MEMORY, f"case {number} of {kind} took {taken / 1e6:.0f} MB"
        shutil.rmtree(folder)
    assert refused, "nothing was damaged"
