"""Which figures there are, what each needs, and how they are made from trained runs."""

from __future__ import annotations

import dataclasses
import html
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dropmax.errors import InvalidValue, RunError, unknown
from dropmax.lab.figures import (
    architecture,
    condition,
    confidence,
    confusion_graph,
    contours,
    noise,
    profiles,
    training,
)
from dropmax.lab.figures.recording import find_recording, record
from dropmax.lab.figures.runs import NotDrawable, Run, Subject, by_data, data_name, slug
from dropmax.workbench import style
from dropmax.workbench.files import make_directory, write_atomically

__all__ = ["FIGURES", "Figure", "Made", "Needs", "make_figures"]


@dataclass(frozen=True)
class Needs:
    """What a figure is drawn from.

    >>> Needs(masks=True, base=True, images=True, classes=(2, 12)).words()
    'a softmax and a dropmax run on the same images of 2 to 12 classes'
    """

    runs: bool = False  #: any run will do, of any head
    masks: bool = False  #: a run whose head learns masks, such as dropmax
    base: bool = False  #: also a softmax run on the same data
    images: bool = False  #: data that are images
    classes: tuple[int, int | None] = (2, None)  #: the fewest and the most it can show
    recordings: bool = False  #: the run's training, step by step (``--record``)

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
    """A figure: ``draw`` takes a :class:`Subject` and returns a matplotlib figure and, in words, what it measured."""

    name: str
    place: str  #: where the paper has it
    caption: str
    draw: Callable[[Subject], tuple[Any, str]]
    needs: Needs = Needs()
    all_data: bool = False  #: one picture for all data sets together, rather than one for each
    uses_recordings: bool = False  #: whether it is drawn from them where they are; ``needs`` says whether it must be


_BEYOND = "beyond the paper"

#: Every figure by name, in the order of the paper.
FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        Figure("concept", "Figure 1", profiles.CONCEPT, profiles.draw_concept,
               Needs(masks=True, images=True, classes=(3, 12))),
        Figure("architecture", "Figure 2", architecture.CAPTION, architecture.draw, all_data=True),
        Figure("convergence", "Figure 3", training.CONVERGENCE, training.draw_convergence, Needs(runs=True),
               all_data=True, uses_recordings=True),
        Figure("retain-profiles", "Figure 4", profiles.PROFILES, profiles.draw_profiles,
               Needs(masks=True, base=True, images=True, classes=(2, 12))),
        Figure("examples", "Figure 5", profiles.EXAMPLES, profiles.draw_examples,
               Needs(masks=True, base=True, images=True, classes=(6, None))),
        Figure("contours", "Appendix, Figure 6", contours.CAPTION, contours.draw, all_data=True),
        Figure("noise", "Appendix, Figure 7", noise.CAPTION, noise.draw, Needs(masks=True, images=True)),
        Figure("gradient-norms", "Appendix B", training.GRADIENTS, training.draw_gradients,
               Needs(masks=True, base=True, recordings=True), uses_recordings=True),
        Figure("condition-1", "Appendix B", condition.CAPTION, condition.draw, Needs(masks=True)),
        Figure("reliability", _BEYOND, confidence.RELIABILITY, confidence.draw_reliability, Needs(runs=True)),
        Figure("rejection", _BEYOND, confidence.REJECTION, confidence.draw_rejection, Needs(runs=True)),
        Figure("confusion-graph", _BEYOND, confusion_graph.CAPTION, confusion_graph.draw, Needs(masks=True)),
        Figure("mask-curves", _BEYOND, training.MASKS, training.draw_masks, Needs(masks=True)),
    )
}  # fmt: skip


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
    chosen, forms = _chosen(only, recorded), _formats(formats)
    style.pyplot()  # say that matplotlib is missing before the work, not after it
    out = Path(out)
    command = command or shlex.join(["dropmax", *sys.argv[1:]])
    planned, refused = _plan(chosen, runs, out, recorded)
    if only and refused:
        raise RunError(f"the figure {refused[0].name} {refused[0].why_not}")
    _refuse_to_overwrite([out / f"{stem}.{form}" for _, _, stem in planned for form in forms], force)
    captions = _Captions(out / "captions.md", force)
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
        captions.add(figure, one, subject.runs if figure.needs != Needs() else (), command)
        tell(one)
        made.append(one)
    for one in refused:
        tell(one)
    return made + refused


def _chosen(only: Sequence[str], recorded: bool) -> list[Figure]:
    for name in only:
        if name not in FIGURES:
            raise InvalidValue(unknown("figure", name, FIGURES))
    chosen = [figure for figure in FIGURES.values() if not only or figure.name in only]
    if recorded and not any(figure.uses_recordings for figure in chosen):
        users = ", ".join(figure.name for figure in FIGURES.values() if figure.uses_recordings)
        raise InvalidValue(f"--record is for {users}: leave it out for {', '.join(only)}")
    return chosen


def _formats(formats: Sequence[str]) -> list[str]:
    if not formats:
        raise InvalidValue(f"name at least one format of {', '.join(style.FORMATS)}")
    for form in formats:
        if form not in style.FORMATS:
            raise InvalidValue(unknown("format", form, style.FORMATS, "separate several by commas"))
    return list(dict.fromkeys(formats))


def _plan(
    chosen: Sequence[Figure], runs: Sequence[Run], out: Path, recorded: bool
) -> tuple[list[tuple[Figure, Subject, str]], list[Made]]:
    """Return what to draw, of what and under which name, and the figures that no data set has enough for."""
    planned: list[tuple[Figure, Subject, str]] = []
    refused: list[Made] = []
    by_name: dict[str, list[Run]] = {}
    for group in by_data(runs).values():
        name = slug(data_name(group[0].recipe))
        while name in by_name:  # two folders of the same name in different places
            name += "-2"
        by_name[name] = group
    for figure in chosen:
        candidates: dict[str, Sequence[Run]] = {f"{figure.name}-{name}": group for name, group in by_name.items()}
        if figure.all_data or not runs:
            candidates = {figure.name: runs}
        needs = dataclasses.replace(figure.needs, recordings=False) if recorded else figure.needs
        reasons = []
        for stem, members in candidates.items():
            recordings = {run: find_recording(run, out) for run in members} if figure.uses_recordings else {}
            subject = Subject(members, {run: found for run, found in recordings.items() if found is not None})
            reason = needs.missing(subject)
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
    files = tuple(out / f"{stem}.{form}" for form in forms)
    for form, path in zip(forms, files, strict=True):
        content = style.encode(drawn, form, title=f"{stem} ({figure.place})", description=caption, command=command)
        write_atomically(path, content)
    style.pyplot().close(drawn)
    return Made(stem, files, caption)


def _refuse_to_overwrite(files: Sequence[Path], force: bool) -> None:
    there = [path for path in files if path.exists()]
    if there and not force:
        others = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise RunError(
            f"{there[0]}{others} would be overwritten: use --force, choose figures with --only, or another --out"
        )


class _Captions:
    """``captions.md``, one section per figure; sections of figures made earlier stay."""

    TITLE = "# Figures"

    def __init__(self, path: Path, force: bool) -> None:
        self.path = path
        self.sections: dict[str, str] = {}
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else self.TITLE
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"cannot read {path}: {error}") from error
        if not text.startswith(self.TITLE) and not force:
            raise RunError(f"{path} is not ours and would be overwritten: use --force, or another --out")
        for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
            self.sections[section.split("\n", 1)[0].strip()] = f"## {section.strip()}\n"

    def add(self, figure: Figure, made: Made, runs: Sequence[Run], command: str) -> None:
        """Write the section of one more figure. Class names in a caption stay text, whatever they look like."""
        lines = [f"## {made.name}", "", f"*{figure.place}.* {html.escape(made.caption, quote=False)}", ""]
        lines += [f"- files: {', '.join(path.name for path in made.files)}"]
        lines += [f"- runs: {', '.join(str(run.path) for run in runs)}"] if runs else []
        lines += [f"- command: `{command}`", ""]
        self.sections[made.name] = "\n".join(lines)
        write_atomically(self.path, f"{self.TITLE}\n\n" + "\n".join(self.sections.values()))
