"""One run on several processes: what torchrun says, and nothing where it says nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is.

    >>> Ranks().is_first, Ranks().world_size
    (True, 1)
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this process logs and writes files."""
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """Add a tensor up over the processes."""
        if self.world_size > 1:
            dist.all_reduce(x)
        return x

    def wait(self) -> None:
        """Wait for the others."""
        if self.world_size > 1:
            dist.barrier()


@contextlib.contextmanager
def process_group() -> Iterator[Ranks]:
    """Join the processes torchrun started: NCCL where there are GPUs, gloo elsewhere.

    >>> with process_group() as ranks:
    ...     ranks.world_size
    1
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Ranks()
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield Ranks(dist.get_rank(), world_size, int(os.environ.get("LOCAL_RANK", "0")))
    finally:
        dist.destroy_process_group()
