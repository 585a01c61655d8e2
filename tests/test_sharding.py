"""Classes shared by 2 and by 4 processes: each runs every case of sharding_worker.py and compares with one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sharding_worker import CASES

WORKER = Path(__file__).with_name("sharding_worker.py")


@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_heads_do_what_whole_heads_do(ranks: int, tmp_path: Path) -> None:
    arguments = [sys.executable, str(WORKER), str(tmp_path / "store")]
    workers = [
        subprocess.Popen([*arguments, str(rank), str(ranks)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        outputs = [worker.communicate(timeout=240) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    expected = [*CASES, *(["two_by_two"] if ranks == 4 else [])]
    for (output, errors), worker in zip(outputs, workers, strict=True):
        assert worker.returncode == 0, errors[-3000:]
        assert output.split() == expected
