"""A Ray cluster of one node for as long as a campaign needs it.

It is started by a process of its own: a process that has spoken to Ray has threads, and must not be forked any more.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dropmax
from dropmax.errors import RunError

_ANNOUNCEMENT = "the address is "


@contextlib.contextmanager
def ray_cluster() -> Iterator[Path]:
    """Start a node, let ``RAY_ADDRESS`` lead there, and yield the directory its tasks have their directories in."""
    place = Path(tempfile.mkdtemp(prefix="dm", dir="/tmp"))  # the paths of sockets must be short
    environment = {
        **os.environ,
        "TMPDIR": str(place),
        "PYTHONPATH": os.pathsep.join([str(Path(dropmax.__file__).parents[1]), str(Path(__file__).parents[1])]),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", "from hardening.rays import host; host()"]
    before = os.environ.get("RAY_ADDRESS")
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    try:
        said = next((line for line in process.stdout or () if line.startswith(_ANNOUNCEMENT)), "")
        if not said:
            raise RunError(f"no Ray cluster could be started: it ended with status {process.wait()}")
        os.environ["RAY_ADDRESS"] = said.removeprefix(_ANNOUNCEMENT).strip()
        yield place
    finally:
        process.communicate()  # closes its input, on which it shuts the cluster down
        os.environ.pop("RAY_ADDRESS", None)
        if before is not None:
            os.environ["RAY_ADDRESS"] = before
        shutil.rmtree(place, ignore_errors=True)


def host() -> None:
    """Be the process that holds the cluster until its input ends."""
    from ray.cluster_utils import Cluster

    small: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster: Any = Cluster(initialize_head=True, head_node_args=small)
    try:
        print(_ANNOUNCEMENT + cluster.address, flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()
