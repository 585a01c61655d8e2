"""Files that are whole or not there, and what killed writers leave."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dropmax.errors import RunError
from dropmax.workbench.files import CannotWrite, lock, write_atomically
from dropmax.workbench.recipes import load_recipe
from dropmax.workbench.training import RunDirectory

LEFT = ".note.json.abcd1234.tmp"


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    strangers = [".note.json.tmp", ".other.json.abcd1234.tmp", ".note.json.ABCD1234.tmp", "note.json.abcd1234.tmp"]
    for name in (LEFT, *strangers):
        (tmp_path / name).write_text("half")
    write_atomically(tmp_path / "note.json", "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["note.json", *strangers])


def test_what_a_writer_at_work_has_is_left_alone(tmp_path: Path) -> None:
    with open(tmp_path / LEFT, "w") as other:
        assert lock(other.fileno())
        write_atomically(tmp_path / "note.json", "whole")
        assert (tmp_path / LEFT).exists()
    write_atomically(tmp_path / "note.json", "again")
    assert [path.name for path in tmp_path.iterdir()] == ["note.json"]


def test_a_link_of_that_name_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / LEFT).symlink_to(tmp_path / "precious")
    write_atomically(tmp_path / "note.json", "whole")
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / LEFT).is_symlink()


def test_a_file_swept_away_before_it_was_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tempfile import mkstemp

    made: list[str] = []

    def swept_once(*args: object, **options: object) -> tuple[int, str]:
        descriptor, name = mkstemp(*args, **options)  # type: ignore[call-overload]
        if not made:
            os.unlink(name)
        made.append(name)
        return descriptor, name

    monkeypatch.setattr("tempfile.mkstemp", swept_once)
    write_atomically(tmp_path / "note.json", "whole")
    assert len(made) == 2
    assert (tmp_path / "note.json").read_text() == "whole"


def test_a_full_disk_leaves_no_half_row_in_the_log(tmp_path: Path) -> None:
    import resource

    run = RunDirectory.create(tmp_path / "run", load_recipe("mnist-1k"), {})
    run.append_log('{"epoch": 1}\n')
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        with pytest.raises(CannotWrite, match=r"cannot write .*metrics\.jsonl: "):
            run.append_log('{"epoch": 2}\n')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (run.path / "metrics.jsonl").read_text() == '{"epoch": 1}\n'
    assert issubclass(CannotWrite, RunError)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CannotWrite, match=r"cannot write .*result\.json: No space left on device"):
        write_atomically(path, b"new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]
