"""One thread a test process: two of them share two cores, and small tensors do not want more."""

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
