"""The determinism campaign in its short form, and whether it would notice other bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dropmax.errors import RunError
from hardening import determinism
from hardening.campaign import Outcome


def test_the_short_campaign_finds_the_same_bytes(tmp_path: Path) -> None:
    outcome = determinism.run(short=True, seed=0, scratch=tmp_path)
    assert outcome.failures == []
    number = len(determinism.SHORT_HEADS)
    for what in ("save and load in the middle", "a saved and loaded model"):
        assert outcome.counts[f"{what}: the same bytes"] == number
    assert outcome.tried == 3 * number


def digests(**changes: str) -> determinism.Digests:
    return {
        "mlp, softmax": {"model.safetensors": "a", "predictions (mean)": "b", "predictions (mean), loaded": "b"}
        | changes
    }


def test_it_notices_other_bytes() -> None:
    outcome = Outcome()
    determinism.compare("another process", digests(), digests(**{"model.safetensors": "z"}), outcome)
    determinism.check_loaded(digests(**{"predictions (mean), loaded": "z"}), outcome)
    assert outcome.failures == [
        "mlp, softmax: another process changes model.safetensors",
        "mlp, softmax: a model that was saved and loaded predicts other bytes",
    ]


def test_what_threads_change_is_listed_and_not_held_against_anybody() -> None:
    outcome = Outcome()
    assert determinism.tabulate(digests(), digests(), outcome) == {}
    table = determinism.tabulate(digests(), digests(**{"model.safetensors": "z"}), outcome)
    assert table == {"mlp, softmax": ["model.safetensors"]}
    assert (outcome.failed, outcome.tried) == (0, 2)


def test_a_process_that_dies_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such module >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(RunError, match="a process of the campaign ended with 3: no such module"):
        determinism.in_new_process({"threads": 1}, tmp_path)
