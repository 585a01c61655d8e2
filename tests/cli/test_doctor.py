"""``dropmax doctor``: what is there, what is not, and what to do; broken things are lines, not tracebacks."""

from __future__ import annotations

import importlib.metadata
import json
import signal
from pathlib import Path

import pytest
import torch

from dropmax.workbench import doctor
from dropmax.workbench.doctor import EXTRAS, Report, examine
from tests.cli.asking import as_json
from tests.command import Run


def test_it_knows_the_dependencies_of_the_package() -> None:
    declared = importlib.metadata.metadata("dropmax").get_all("Provides-Extra")
    assert declared is not None
    assert set(declared) - {"docs", "dev", "test"} == set(EXTRAS)
    assert set(doctor._required()) == {"torch", "numpy", "safetensors", "typer", "pillow", "pydantic", "filelock"}
    assert set(doctor._required("export")) == {"onnx", "onnxscript", "onnxruntime"}


def test_the_whole_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROPMAX_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("DROPMAX_CACHE", str(tmp_path / "cache"))
    found = as_json("doctor")
    assert found["usable"]
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["devices"][0] == "cpu"
    assert found["data"]["looked_in"] == str(tmp_path / "nowhere")
    sets = {line["name"]: line["found"] for line in found["data"]["sets"]}
    assert sets["mnist-1k"] == "inside the package"
    assert sets["cub"] is None
    assert {place["what"]: place["path"] for place in found["places"]}["caches"] == str(tmp_path / "cache")
    assert all(place["writable"] for place in found["places"])
    assert not (tmp_path / "cache").exists(), "looking should make nothing"
    assert any("nowhere is not a directory" in problem["what"] for problem in found["problems"])


def test_a_torch_that_does_not_work_is_a_line_and_exit_code_1(dropmax: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TORCH_PROBE", "raise ImportError('libtorch.so is missing')")
    monkeypatch.setattr(doctor, "_BFLOAT16_PROBE", "raise ImportError('libtorch.so is missing')")
    done = dropmax("doctor")
    assert done.returncode == 1
    assert "BROKEN: torch, or dropmax on it, does not work: ImportError: libtorch.so is missing" in done.stdout
    assert "bfloat16" not in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_processor_that_dies_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    dies = "import os, signal\nif 'ONEDNN_MAX_CPU_ISA' not in os.environ: os.kill(os.getpid(), signal.SIGILL)"
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(doctor, "_BFLOAT16_PROBE", dies)
    monkeypatch.setattr(doctor, "_TORCH_PROBE", _quick_probe())
    report = examine()
    (problem,) = [problem for problem in report.problems if "bfloat16" in problem.what]
    assert "killed by SIGILL; it announces AMX" in problem.what
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in problem.advice
    assert report.usable
    assert report.machine["bfloat16"] is False


def test_a_probe_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SECONDS", 1)
    monkeypatch.setattr(doctor, "_TORCH_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "_BFLOAT16_PROBE", "")
    report = examine()
    assert not report.usable
    assert "no answer within 1 s" in report.problems[-1].what


def test_what_is_missing_is_named_with_its_command(dropmax: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None if package in ("ray", "numpy") else "1.0")
    monkeypatch.setattr(doctor, "_TORCH_PROBE", _quick_probe(cache="/proc/no/such"))
    monkeypatch.setattr(doctor, "_BFLOAT16_PROBE", "")
    done = dropmax("doctor")
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    for words in (
        "BROKEN: numpy is not installed. What to do: pip install dropmax.",
        'many runs on many machines missing ray: pip install "dropmax[ray]"',
        "/proc/no/such, for caches, cannot be written to. What to do: name another directory in DROPMAX_CACHE",
        "mnist-9k not found",
        "cifar-9 /data (without train.bin)",
    ):
        assert words in text


def _quick_probe(cache: str = "/tmp") -> str:
    sets: list[dict[str, object]] = [{"name": "mnist-9k", "found": None, "missing": ["x"]}]
    sets.append({"name": "cifar-9", "found": "/data", "missing": ["train.bin"]})
    found = {"devices": ["cpu"], "threads": 1, "cache": cache, "embedded": [], "looked_in": "/data", "sets": sets}
    return f"print({json.dumps(found)!r})"


def test_how_a_process_ended() -> None:
    assert doctor._ending(-signal.SIGKILL, "") == "killed by SIGKILL"
    assert doctor._ending(3, "") == "exit code 3"
    assert Report().usable
