"""Which figures there are, what each needs, and how they are made from trained runs."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dropmax.errors import InvalidValue, RunError, unknown
from dropmax.lab.figures import (
    architecture,
    concept,
    condition,
    confusion_graph,
    contours,
    convergence,
    examples,
    gradient_norms,
    mask_curves,
    noise,
    rejection,
    reliability,
    retain_profiles,
)
from dropmax.lab.figures.captions import Captions
from dropmax.lab.figures.recording import find_recording, record
from dropmax.lab.figures.runs import Run, by_data, data_name, slug
from dropmax.lab.figures.subject import NotDrawable, Subject
from dropmax.workbench import style
from dropmax.workbench.files import make_directory, write_atomically

__all__ = ["FIGURES", "Figure", "Made", "Needs", "make_figures"]


@dataclass(frozen=True)
class Needs:
    """What a figure is drawn from.

    Args:
        runs: whether any run will do, of any head.
        masks: a run whose head learns masks, such as dropmax.
        base: also a softmax run on the same data.
        images: data that are images.
        classes: the fewest and the most classes it can show.
        recordings: the run's training, step by step (``--record``).

    >>> Needs(masks=True, base=True, images=True, classes=(2, 12)).words()
    'a softmax and a dropmax run on the same images of 2 to 12 classes'
    """

    runs: bool = False
    masks: bool = False
    base: bool = False
    images: bool = False
    classes: tuple[int, int | None] = (2, None)
    recordings: bool = False

    def words(self) -> str:
        """Say it in words."""
        if not (self.runs or self.masks or self.base):
            return "nothing"
        who = "a softmax and a dropmax run" if self.base else "a dropmax run" if self.masks else "a run"
        least, most = self.classes
        what = " on the same" if self.base else " on" if self.images else ""
        what += " images" if self.images else " data" if self.base else ""
        if most is not None:
            what += f" of {least} to {most} classes"
        elif least > 2:
            what += f" of {least} classes or more"
        return who + what + (", and --record" if self.recordings else "")

    def missing(self, subject: Subject) -> str | None:
        """Say what is missing for a figure of these runs; None where nothing is."""
        if not (self.runs or self.masks or self.base):
            return None
        if not subject.runs:
            return f"needs {self.words()}, and no run was given"
        data = data_name(subject.runs[0].recipe)
        has = f"; given on {data}: {', '.join(dict.fromkeys(run.head.name for run in subject.runs))}"
        if self.masks and subject.masked is None:
            return f"needs a run whose head learns masks: dropmax train {data} --head dropmax{has}"
        if self.base and subject.base is None:
            return f"needs a softmax run on the same data: dropmax train {data} --head softmax{has}"
        first = subject.masked or subject.runs[0]
        if self.images and not first.trained.is_images:
            return f"needs images, and {data} has features"
        least, most = self.classes
        count = len(first.classes)
        if count < least or (most is not None and count > most):
            span = f"{least} to {most} classes" if most is not None else f"at least {least} classes"
            return f"needs data of {span}, such as {'MNIST' if most else 'CIFAR-100'}, and {data} has {count}"
        if self.recordings and any(run not in subject.recordings for run in subject.recorded_pair()):
            return "needs what happened at each step, which a finished run no longer tells: --record trains it again"
        return None


@dataclass(frozen=True)
class Figure:
    """A figure: its name, what it shows in a sentence or two, what it needs, and how it is drawn.

    ``draw`` takes a :class:`Subject` and returns a matplotlib figure and what was measured for it, in words.
    """

    name: str
    place: str  #: where the paper has it
    caption: str
    needs: Needs
    draw: Callable[[Subject], tuple[Any, str]]
    all_data: bool = False  #: one picture for all data sets together, rather than one for each
    uses_recordings: bool = False  #: whether it is drawn from them where they are; ``needs`` says whether it must be


def _figure(
    name: str, module: Any, place: str, *, all_data: bool = False, uses_recordings: bool = False, **needs: Any
) -> Figure:
    uses_recordings |= needs.get("recordings", False)
    return Figure(name, place, module.CAPTION, Needs(**needs), module.draw, all_data, uses_recordings)


#: Every figure by name, in the order of the paper.
FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        _figure("concept", concept, "Figure 1", masks=True, images=True, classes=(3, 12)),
        _figure("architecture", architecture, "Figure 2", all_data=True),
        _figure("convergence", convergence, "Figure 3", all_data=True, uses_recordings=True, runs=True),
        _figure("retain-profiles", retain_profiles, "Figure 4", masks=True, base=True, images=True, classes=(2, 12)),
        _figure("examples", examples, "Figure 5", masks=True, base=True, images=True, classes=(6, None)),
        _figure("contours", contours, "Appendix, Figure 6", all_data=True),
        _figure("noise", noise, "Appendix, Figure 7", masks=True, images=True),
        _figure("gradient-norms", gradient_norms, "Appendix B", masks=True, base=True, recordings=True),
        _figure("condition-1", condition, "Appendix B", masks=True),
        _figure("reliability", reliability, "beyond the paper", runs=True),
        _figure("rejection", rejection, "beyond the paper", runs=True),
        _figure("confusion-graph", confusion_graph, "beyond the paper", masks=True),
        _figure("mask-curves", mask_curves, "beyond the paper", masks=True),
    )
}


@dataclass(frozen=True)
class Made:
    """One figure that was made, or the reason why it was not."""

    name: str
    files: tuple[Path, ...]
    caption: str = ""
    why_not: str = ""


def make_figures(
    runs: Sequence[Run],
    out: Path | str,
    *,
    only: Sequence[str] = (),
    formats: Sequence[str] = ("png", "svg"),
    recorded: bool = False,
    force: bool = False,
    command: str | None = None,
    tell: Callable[[Made], None] = lambda made: None,
) -> list[Made]:
    """Draw every figure that these runs allow into a directory, with their captions in ``captions.md``.

    Args:
        runs: from :func:`dropmax.lab.figures.runs.load_runs`.
        out: the directory; made where it is missing.
        only: names in :data:`FIGURES`; what these need and is missing is then an error.
        formats: of "png", "svg" and "pdf".
        recorded: train the runs again where a figure needs their history and it was not recorded yet.
        force: replace files that are there.
        command: what made them, for captions and metadata; ``sys.argv`` by default.
        tell: called with each figure as soon as it is there, or the reason why it is not.

    >>> import tempfile
    >>> [made] = make_figures([], tempfile.mkdtemp(), only=["architecture"], formats=["svg"])
    >>> made.files[0].name
    'architecture.svg'
    """
    chosen = _chosen(only)
    if recorded and not any(figure.uses_recordings for figure in chosen):
        users = ", ".join(figure.name for figure in FIGURES.values() if figure.uses_recordings)
        raise InvalidValue(f"--record is for {users}: leave it out for {', '.join(only)}")
    forms = _formats(formats)
    style.pyplot()  # say that matplotlib is missing before the work, not after it
    out = Path(out)
    command = command or shlex.join(["dropmax", *sys.argv[1:]])
    planned, refused = _plan(chosen, runs, out, recorded)
    if only and refused:
        raise RunError(f"the figure {refused[0].name} {refused[0].why_not}")
    _refuse_to_overwrite([out / f"{stem}.{form}" for _, _, stem in planned for form in forms], force)
    captions = Captions(out / "captions.md", force)
    made = []
    for figure, subject, stem in planned:
        if recorded and figure.uses_recordings:
            wanted = subject.recorded_pair() if figure.needs.recordings else subject.runs
            subject = Subject(subject.runs, {run: record(run, out, command=command) for run in wanted})
        try:
            one = _make(figure, subject, out, stem, forms, command)
        except NotDrawable as reason:
            if only:
                raise RunError(f"the figure {stem} {reason}") from None
            refused.append(Made(stem, (), why_not=str(reason)))
            continue
        given = [run.path for run in subject.runs] if figure.needs != Needs() else []
        captions.add(one.name, figure.place, one.caption, one.files, given, command)
        tell(one)
        made.append(one)
    for one in refused:
        tell(one)
    return made + refused


def _plan(
    chosen: Sequence[Figure], runs: Sequence[Run], out: Path, recorded: bool
) -> tuple[list[tuple[Figure, Subject, str]], list[Made]]:
    """Return what to draw, of what and under which name, and the figures that no data set has enough for."""
    planned: list[tuple[Figure, Subject, str]] = []
    refused: list[Made] = []
    subjects = _subjects(runs)
    for figure in chosen:
        if figure.all_data:
            candidates = {figure.name: Subject(list(runs))}
        else:
            candidates = {f"{figure.name}-{name}": s for name, s in subjects.items()} or {figure.name: Subject([])}
        reasons = []
        for stem, subject in candidates.items():
            if figure.uses_recordings:
                subject = _with_recordings(subject, out)
            needs = figure.needs
            reason = (dataclasses.replace(needs, recordings=False) if recorded else needs).missing(subject)
            if reason is None:
                planned.append((figure, subject, stem))
            else:
                reasons.append(reason)
        if len(reasons) == len(candidates):
            refused.append(Made(figure.name, (), why_not=reasons[0]))
    return planned, refused


def _make(figure: Figure, subject: Subject, out: Path, stem: str, forms: Sequence[str], command: str) -> Made:
    drawn, measured = figure.draw(subject)
    caption = " ".join(f"{figure.caption} {measured}".split())
    make_directory(out)
    files = []
    for form in forms:
        content = style.encode(drawn, form, title=f"{stem} ({figure.place})", description=caption, command=command)
        write_atomically(out / f"{stem}.{form}", content)
        files.append(out / f"{stem}.{form}")
    style.pyplot().close(drawn)
    return Made(stem, tuple(files), caption)


def _subjects(runs: Sequence[Run]) -> dict[str, Subject]:
    """Group runs by their data, each under a name fit for files."""
    named: dict[str, Subject] = {}
    for group in by_data(runs).values():
        name = slug(data_name(group[0].recipe))
        while name in named:  # two folders of the same name in different places
            name += "-2"
        named[name] = Subject(group)
    return named


def _with_recordings(subject: Subject, out: Path) -> Subject:
    found = {run: find_recording(run, out) for run in subject.runs}
    return Subject(subject.runs, {run: recording for run, recording in found.items() if recording is not None})


def _chosen(only: Sequence[str]) -> list[Figure]:
    for name in only:
        if name not in FIGURES:
            raise InvalidValue(unknown("figure", name, FIGURES))
    return [figure for figure in FIGURES.values() if not only or figure.name in only]


def _formats(formats: Sequence[str]) -> list[str]:
    found = list(dict.fromkeys(formats))
    for form in found:
        if form not in style.FORMATS:
            raise InvalidValue(unknown("format", form, style.FORMATS, "separate several by commas"))
    if not found:
        raise InvalidValue(f"name at least one format of {', '.join(style.FORMATS)}")
    return found


def _refuse_to_overwrite(files: Sequence[Path], force: bool) -> None:
    there = [path for path in files if path.exists()]
    if there and not force:
        others = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise RunError(
            f"{there[0]}{others} would be overwritten: use --force, choose figures with --only, or another --out"
        )
