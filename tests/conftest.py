"""One thread a test process: two of them share two cores, and small tensors do not want more."""

import os

# Some virtual machines announce AMX and then die of it (SIGILL) in a bfloat16 product. oneDNN reads this once, early.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# The command line's own processes, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# No deadline: the machine that runs the tests may be busy. Derandomised: a red build can be run again.
settings.register_profile("dropmax", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("dropmax")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
