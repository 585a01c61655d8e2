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
from tests.slow import data_files, image_files, run_files, table_files
from tests.slow.rounds import ROUNDS

SECONDS, MEMORY = 5.0, 1 << 30  #: of processor time and of additional memory, per file

#: How a file is made, how it is read, and how many are tried in the short form.
KINDS: dict[str, tuple[Callable[[Random, Path], None], Callable[[Path], object], int]] = {
    "idx": (data_files.make_mnist, data_files.read_mnist_files, 30),
    "cifar": (data_files.make_cifar, data_files.read_cifar, 20),
    "cub": (data_files.make_cub, data_files.read_cub, 30),
    "archive": (data_files.make_archive, data_files.read_archive, 15),
    "image": (image_files.make_image, image_files.read_image, 45),
    "npz": (table_files.make_npz, table_files.read_table, 30),
    "csv": (table_files.make_csv, table_files.read_table, 30),
    "parquet": (table_files.make_parquet, table_files.read_table, 25),
    "recipe": (run_files.make_recipe, run_files.read_recipe, 20),
    "study": (run_files.make_study, run_files.read_study, 10),
    "checkpoint": (run_files.make_checkpoint, run_files.read_checkpoint, 15),
    "model": (run_files.make_model, run_files.read_model, 10),
    "log": (run_files.make_log, run_files.read_log, 10),
    "results": (run_files.make_results, run_files.read_results, 10),
}


@pytest.mark.filterwarnings("error::RuntimeWarning")  # a number that silently became another
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_malformed_file_is_read_or_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROPMAX_CACHE", str(tmp_path / "cache"))
    make, read, count = KINDS[kind]
    became = {"read": 0, "refused": 0, "refused without a word": 0}
    for number in range(count * ROUNDS):
        folder = tmp_path / "case"
        folder.mkdir()
        make(Random(f"{kind}/{number}"), folder)
        memory, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        try:
            read(folder)
            became["read"] += 1
        except DropMaxError as error:
            became["refused" if str(error).strip() else "refused without a word"] += 1
        except Exception as error:
            raise AssertionError(f"case {number} of {kind} ended in {error!r}") from error
        assert time.process_time() - started < SECONDS, f"case {number} of {kind} was slow"
        taken = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory)
        assert taken < MEMORY, f"case {number} of {kind} took {taken / 1e6:.0f} MB"
        shutil.rmtree(folder)
    assert became["refused"], "nothing was damaged"
    assert not became["refused without a word"]
