"""What ``dropmax doctor`` finds out: versions, devices, data, extras, places to write to, and known problems.

Nothing here imports torch: what needs it runs in processes of its own, so that a torch that cannot be imported, or a
processor that dies of an instruction, is a line of the report and not its end.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: What each extra of the package is for; its metadata say what the extra brings.
EXTRAS = {
    "figures": "pictures: the demo's, the paper's, a model card's",
    "images": "dropmax embed of photographs",
    "text": "dropmax embed of sentences",
    "parquet": "tables in .parquet files",
    "tensorboard": "dropmax train --log tensorboard",
    "mlflow": "dropmax train --log mlflow",
    "wandb": "dropmax train --log wandb",
    "sklearn": "DropMaxClassifier",
    "export": "dropmax export --format onnx",
    "hub": "models from and to the Hugging Face hub",
    "explore": "dropmax explore",
    "lab": "dropmax reproduce and report; results as a table",
    "ray": "many runs on many machines",
}

_SECONDS = 120  # for a probe: importing torch from a cold network disc takes a while

_TORCH_PROBE = """
import json, sys
import torch
from dataclasses import asdict
devices = ["cpu"]
if torch.cuda.is_available():
    devices += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
if torch.backends.mps.is_available():
    devices.append("mps")
from dropmax import DropMax
head = DropMax(in_features=8, num_classes=3)
loss = head.loss(torch.randn(5, 8), torch.arange(5) % 3).total
loss.backward()
assert torch.isfinite(loss), f"the loss of a small head is {loss.item()}"
exact = head.predict_proba(torch.randn(5, 8), "exact").sum(-1)
assert torch.allclose(exact, torch.ones(5), atol=1e-5), f"exact probabilities sum to {exact.tolist()}"
from dropmax.workbench.data import cache_directory, check, data_directory, inventory
where = sys.argv[1] or None
embedded = [finding.detail or finding.what for finding in check("mnist-1k") if finding.status != "ok"]
found = {
    "devices": devices,
    "threads": torch.get_num_threads(),
    "cache": str(cache_directory()),
    "embedded": embedded,
    "looked_in": str(data_directory(where)),
    "sets": [asdict(held) for held in inventory(where)],
}
print(json.dumps(found))
"""

_BFLOAT16_PROBE = """
import torch
for inputs in (64, 256):
    a = torch.randn(64, inputs, dtype=torch.bfloat16)
    (a @ a.T).sum().item()
image = torch.randn(8, 16, 16, 16, dtype=torch.bfloat16)
torch.nn.functional.conv2d(image, torch.randn(32, 16, 3, 3, dtype=torch.bfloat16)).sum().item()
"""


@dataclass(frozen=True)
class Extra:
    """An optional part of dropmax: what it is for, which of its packages are there, and which are not."""

    name: str
    purpose: str
    versions: dict[str, str]
    missing: tuple[str, ...]
    pip: str  #: the command that brings what is missing


@dataclass(frozen=True)
class Problem:
    """Something that does not work, and what to do; with an essential one, dropmax cannot be used."""

    what: str
    advice: str
    essential: bool = False


@dataclass
class Report:
    """All that was found."""

    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    extras: list[Extra] = field(default_factory=list)
    places: list[dict[str, Any]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def add(self, what: str, advice: str, *, essential: bool = False) -> None:
        """Add a problem."""
        self.problems.append(Problem(what, advice, essential))

    @property
    def usable(self) -> bool:
        """Whether nothing essential is broken."""
        return not any(problem.essential for problem in self.problems)

    def to_dict(self) -> dict[str, Any]:
        """Return the report for a script."""
        return asdict(self) | {"usable": self.usable}


def examine(data_dir: Path | None = None) -> Report:
    """Look at everything; takes as long as importing torch, twice."""
    torch_probe = _start(_TORCH_PROBE, str(data_dir or ""))
    bfloat16_probe = _start(_BFLOAT16_PROBE)
    report = Report()
    _look_at_versions(report)
    _look_at_extras(report)
    _look_at_place(report, "temporary files", Path(tempfile.gettempdir()), "TMPDIR")
    if not any(map(shutil.which, ("c++", "g++", "cl"))):
        report.add("there is no C++ compiler", "install one to use training.compile=true; nothing else needs it")
    report.machine = {"system": platform.platform(), "cores": os.cpu_count(), "threads": None, "devices": []}
    _wait_for_torch(torch_probe, report)
    _wait_for_bfloat16(bfloat16_probe, report)
    return report


def _look_at_versions(report: Report) -> None:
    report.versions["python"] = platform.python_version()
    for package in ("dropmax", *_required()):
        version = _version(package)
        report.versions[package] = version or "missing"
        if version is None:
            report.add(f"{package} is not installed", "pip install dropmax", essential=True)


def _look_at_extras(report: Report) -> None:
    for name, purpose in EXTRAS.items():
        found = {package: _version(package) for package in _required(name)}
        there = {package: version for package, version in found.items() if version is not None}
        if name == "mlflow" and not there and (version := _version("mlflow")) is not None:
            there, found = {"mlflow": version}, {}  # the whole of it instead of its small package
        missing = tuple(package for package, version in found.items() if version is None)
        report.extras.append(Extra(name, purpose, there, missing, f'pip install "dropmax[{name}]"'))


def _look_at_place(report: Report, what: str, path: Path, variable: str) -> None:
    existing = next((parent for parent in (path, *path.parents) if parent.exists()), path)
    free = None
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"dropmax")
        free = shutil.disk_usage(existing).free
    except OSError:
        report.add(f"{path}, for {what}, cannot be written to", f"name another directory in {variable}")
    report.places.append({"what": what, "path": str(path), "writable": free is not None, "free_bytes": free})


def _wait_for_torch(probe: subprocess.Popen[str], report: Report) -> None:
    code, out, error = _wait(probe)
    if code != 0:
        what = f"torch, or dropmax on it, does not work: {_ending(code, error)}"
        report.add(what, "install torch again, see pytorch.org", essential=True)
        return
    found = json.loads(out.splitlines()[-1])
    _look_at_place(report, "caches", Path(found["cache"]), "DROPMAX_CACHE")
    report.machine["devices"], report.machine["threads"] = found["devices"], found["threads"]
    report.data = {"looked_in": found["looked_in"], "sets": found["sets"]}
    for detail in found["embedded"]:
        report.add(f"the digits inside the package: {detail}", "install dropmax again", essential=True)
    chosen = os.environ.get("DROPMAX_DATA")
    if chosen and not Path(chosen).expanduser().is_dir():
        report.add(f"DROPMAX_DATA={chosen} is not a directory", "set it to where the data sets are")
    cores, threads = report.machine["cores"], found["threads"]
    if cores and threads > cores:
        report.add(f"torch uses {threads} threads on {cores} cores", "set OMP_NUM_THREADS, or use --threads")


def _wait_for_bfloat16(probe: subprocess.Popen[str], report: Report) -> None:
    code, _, error = _wait(probe)
    report.machine["bfloat16"] = code == 0
    if code == 0 or not report.usable:  # where torch itself is broken, that is the problem
        return
    what = f"a product in bfloat16 ends the process on this processor: {_ending(code, error)}"
    advice = "do not train with training.precision=bfloat16 here"
    if _wait(_start(_BFLOAT16_PROBE, ONEDNN_MAX_CPU_ISA="AVX512_CORE_BF16"))[0] == 0:
        what += "; it announces AMX but cannot run it"
        advice = "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 to train with training.precision=bfloat16"
    report.add(what, advice)


def _start(script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    source = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    command, env = [sys.executable, "-c", script, *arguments], os.environ | {"PYTHONPATH": paths} | environment
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def _wait(probe: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, error = probe.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        probe.kill()
        probe.communicate()
        return 1, "", f"no answer within {_SECONDS} s"
    return probe.returncode, out, error


def _ending(code: int, error: str) -> str:
    """Say in a few words how a process ended."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return (error.strip().splitlines() or [f"exit code {code}"])[-1]


def _required(extra: str = "") -> list[str]:
    """Return the packages that dropmax cannot do without, or those that one of its extras brings."""
    try:
        lines = importlib.metadata.requires("dropmax") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    wanted = re.compile(r"([\w.-]+)[^;]*" + (rf"; extra == ['\"]{extra}['\"]" if extra else ""))
    return [found[1] for found in map(wanted.fullmatch, lines) if found]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
