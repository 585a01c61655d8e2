"""The directory of a table or study: everything measured in one append-only file, ``results.jsonl``.

It has one line per training run, and one per change of the plan. Beside it lie ``tables.md``, ``runs.csv``, runs in
progress (``work/``) and, with ``--keep-runs``, the trained models (``models/``). A run is done once its line is in the
file. A process that is killed while writing leaves part of a line, which readers ignore and the next writer removes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import filelock

from dropmax.errors import DropMaxError, RunError
from dropmax.lab.experiments.plan import Job, Plan
from dropmax.lab.experiments.records import PlanRecord, Record, RunRecord, difference, normal, parse
from dropmax.workbench.files import CannotWrite, write_atomically

__all__ = ["FILE", "Store"]

#: The name of the file.
FILE = "results.jsonl"
_SECONDS_TO_WAIT_FOR_LOCK = 30.0


class Store:
    """Results in a directory.

    >>> import tempfile
    >>> store = Store(tempfile.mkdtemp())
    >>> store.runs()
    []
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.file = self.path / FILE

    def check(self, plan: Plan) -> None:
        """Raise where the results of a plan would not belong with those that are here; change nothing."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is not a directory: choose another place with --out")
        if self.file.exists():
            there = self.plan_record()
            differences = PlanRecord.of(plan, []).differences(there) if there is not None and self.records() else ()
            for what in differences:
                raise RunError(
                    f"{self.path} holds results of a different plan: {what}; choose another place with --out"
                )
        elif self.path.exists() and any(path.name not in (".lock", "work") for path in self.path.iterdir()):
            raise RunError(f"{self.path} is not empty and holds no {FILE}: choose another place with --out")

    def join(self, plan: Plan, command: str) -> None:
        """Make the plan part of this directory's; one of which nothing was done yet is replaced."""
        self.check(plan)
        mine, there = PlanRecord.of(plan, [command]), self.plan_record()
        if there is not None and self.records():
            commands = list(dict.fromkeys([*there.commands, command]))
            grown = {"groups": there.groups | mine.groups, "runs": max(there.runs, mine.runs), "commands": commands}
            mine = mine.model_copy(update=grown)
        if mine != there:
            self.append(mine)

    def plan_record(self) -> PlanRecord | None:
        """Return the plan of this directory as it is stored, or None where there is none."""
        plans = [record for record in self._read() if isinstance(record, PlanRecord)]
        return plans[-1] if plans else None

    def plan(self) -> Plan:
        """Return the plan of this directory: all that was ever asked for here."""
        found = self.plan_record()
        if found is None:
            advice = f"`dropmax reproduce mnist-1k --out {self.path}` makes some"
            raise RunError(f"there are no results in {self.path}: {advice}")
        try:
            return found.plan()
        except DropMaxError as error:
            raise RunError(f"{self.file}: the plan cannot be used: {error}") from error

    def records(self) -> dict[str, RunRecord]:
        """Return the record of every job done or failed, oldest first; the last one where there are several."""
        found: dict[str, RunRecord] = {}
        for record in self._read():
            if isinstance(record, RunRecord):
                found.pop(record.job, None)
                found[record.job] = record
        return found

    def runs(self, kind: str = "runs") -> list[RunRecord]:
        """Return the records of one kind, in the order of their names.

        When a grid has grown and another point won, the runs at the former winner count no more from the first new one
        on: a mean over both would be that of no method.
        """
        found = [record for record in self.records().values() if record.kind == kind]
        point = {record.group: record.point for record in found}  # of the last record
        if kind == "runs":
            found = [record for record in found if record.point == point[record.group]]
        return sorted(found, key=lambda record: record.job)

    def match(self, job: Job, record: RunRecord) -> RunRecord:
        """Return the record if it belongs to the job; raise where the name agrees and the settings do not."""
        # The winning point is taken from results: it must be the one that was asked for, not what a file makes of it.
        point = difference(json.loads(json.dumps(job.point)), record.point, "point")
        recipe = difference(normal(job.recipe.to_dict()), normal(record.recipe))
        if recipe or point:
            why = f"was made with another recipe ({recipe})" if recipe else f"is that of another grid point ({point})"
            raise RunError(f"{self.file}: {job.id} {why}: add --repair to do the run again")
        return record

    def append(self, record: Record) -> None:
        """Write a record at the end of the file, whole or not at all."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with open(self.file, "a+b") as file:
                file.seek(0)
                content = file.read()
                end = _end_of_whole_lines(content)
                file.truncate(end)
                line = record.to_json().encode() + b"\n"
                try:
                    file.write(line if content[:end].endswith(b"\n") or not end else b"\n" + line)
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    with contextlib.suppress(OSError):
                        file.truncate(end)
                    raise
        except OSError as error:
            raise CannotWrite(f"cannot write {self.file}: {error.strerror or error}") from error

    def repair(self) -> None:
        """Move lines that cannot be read to ``results.jsonl.damaged``, so that their runs are done again."""
        if not self.file.exists():
            return
        lines = self.file.read_bytes().splitlines(keepends=True)
        bad = [line for line in lines if not _is_whole(line)]
        if bad:
            damaged = self.file.with_name(f"{FILE}.damaged")
            before = damaged.read_bytes() if damaged.exists() else b""
            write_atomically(damaged, before + b"".join(line.rstrip(b"\n") + b"\n" for line in bad))
            write_atomically(self.file, b"".join(line for line in lines if _is_whole(line)))

    def _read(self) -> list[PlanRecord | RunRecord]:
        try:
            content = self.file.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunError(f"cannot read {self.file}: {error.strerror or error}") from error
        end = _end_of_whole_lines(content)
        if end < len(content):
            warnings.warn(f"{self.file}: ignored the last line, which was not written to its end", stacklevel=3)
        found: list[PlanRecord | RunRecord] = []
        try:
            found.extend(parse(line) for line in content[:end].splitlines())
        except ValueError as error:
            advice = "add --repair to set it aside and do the run again"
            raise RunError(f"{self.file}, line {len(found) + 1}, is damaged ({error}): {advice}") from error
        return found

    def work(self, job: Job) -> Path:
        """Return where a job trains."""
        return self.path / "work" / job.id.replace("/", "-")

    def model(self, job: Job) -> Path:
        """Return where the run directory of a finished job is kept, with ``--keep-runs``."""
        return self.path / "models" / job.id.replace("/", "-")

    def tidy(self, job: Job, *, keep_run: bool = False) -> None:
        """Keep or delete the run directory of a job whose record is written, also by a process that was killed."""
        work, model = self.work(job), self.model(job)
        if keep_run and work.exists():
            try:
                shutil.rmtree(model, ignore_errors=True)
                model.parent.mkdir(exist_ok=True)
                work.rename(model)
            except OSError as error:
                raise CannotWrite(f"cannot rename {work} to {model}: {error.strerror or error}") from error
        shutil.rmtree(work, ignore_errors=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory: two commands at once would do the same runs."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(self.path / ".lock", timeout=_SECONDS_TO_WAIT_FOR_LOCK):
                yield
        except filelock.Timeout as error:
            advice = "wait, or choose another --out"
            raise RunError(f"another `dropmax reproduce` is at work in {self.path}: {advice}") from error
        except OSError as error:
            raise CannotWrite(f"cannot write in {self.path}: {error.strerror or error}") from error


def _is_whole(line: bytes) -> bool:
    try:
        parse(line)
    except ValueError:
        return False
    return True


def _end_of_whole_lines(content: bytes) -> int:
    """Return where the last whole line ends. One that only lacks its line break counts: an editor may have cut that."""
    end = content.rfind(b"\n") + 1
    return len(content) if _is_whole(content[end:]) else end
