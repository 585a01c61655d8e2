"""Which sets are there, and whether their files are whole and sound: ``dropmax data list`` and ``check``."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from dropmax.errors import DataError, DropMaxError
from dropmax.workbench.data.catalogue import NAMES, SOURCES, data_directory, find, source_of
from dropmax.workbench.data.cifar import read_records
from dropmax.workbench.data.images import open_header
from dropmax.workbench.data.loading import list_images, load
from dropmax.workbench.data.mnist import FILES as MNIST_FILES
from dropmax.workbench.data.mnist import embedded_digits, find_mnist, read_idx

# SHA-256 of the unpacked idx files; packing the same file again gives another .gz.
MNIST_CONTENT = {
    "train-images": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


@dataclass(frozen=True)
class Finding:
    """What a check found about one file or folder; "absent" is missing, but can be done without."""

    what: str
    status: Literal["ok", "absent", "missing", "damaged"]
    detail: str


@dataclass(frozen=True)
class Held:
    """A line of the inventory: a known set, its usual sizes, where it was found, and what is missing there."""

    name: str
    classes: int
    train: int
    validation: int
    test: int
    found: str | None
    missing: tuple[str, ...]
    about: str


def inventory(data_dir: str | os.PathLike[str] | None = None) -> list[Held]:
    """Return for every known name whether and where it is; looks for files and does not read them.

    >>> [held.name for held in inventory("no such directory") if held.found]
    ['mnist-1k', 'mnist-5k']
    """
    held = []
    for name, known in NAMES.items():
        found: str | None = "inside the package"
        missing: tuple[str, ...] = ()
        if known.source is not None:
            place, missing = find(known.source, data_directory(data_dir))
            found = None if place is None else str(place)
        held.append(Held(name, known.classes, *known.sizes, found, missing, known.about))
    return held


def check(name_or_path: str | os.PathLike[str], data_dir: str | os.PathLike[str] | None = None) -> list[Finding]:
    """Verify the files of a known set, or of a folder or file of your own by loading it.

    MNIST is compared with the official content; of CIFAR the sizes, label ranges and class counts are; of CUB and
    AWA2 every image must be there and start like an image.

    >>> check("mnist-1k")
    [Finding(what='mnist-20k.xz', status='ok', detail='20,000 digits inside the package')]
    """
    name = os.fspath(name_or_path)
    if name not in NAMES and (os.path.exists(name) or os.sep in name or "." in name):
        return [_look(name, _own, name)]
    source = source_of(name)
    if source is None:
        return [_look("mnist-20k.xz", _embedded)]
    directory = data_directory(data_dir)
    place, missing = find(source, directory)
    if place is None:
        wanted = directory / SOURCES[source].folders[0]
        return [Finding(str(wanted), "missing", f"run `dropmax data fetch {source}`")]
    findings = [
        Finding(str(place / entry), "absent", f"{source} can be used without it, but is not complete")
        if entry in SOURCES[source].optional
        else Finding(str(place / entry), "missing", f"{source} cannot be used without it")
        for entry in missing
    ]
    if source == "mnist":
        return findings + [_look(path, _mnist, part, path) for part, path in find_mnist(directory).items()]
    if source.startswith("cifar"):
        columns, train = ((10,), 10_000) if source == "cifar-10" else ((20, 100), 50_000)
        files = [place / entry for entry in SOURCES[source].entries if entry.endswith(".bin") and entry not in missing]
        return findings + [
            _look(file, _cifar, file, columns, 10_000 if "test" in file.name else train) for file in files
        ]
    return findings if source == "cub" and missing else findings + _images(source, place)


def _look(what: object, look: Callable[..., object], *arguments: object) -> Finding:
    """Return what ``look`` says of a file that is fine, or the error it raises for a damaged one."""
    try:
        return Finding(str(what), "ok", str(look(*arguments)))
    except DropMaxError as error:
        return Finding(str(what), "damaged", str(error))


def _embedded() -> str:
    embedded_digits()
    return "20,000 digits inside the package"


def _own(path: str) -> str:
    data = load(path)
    sizes = f"{len(data.train):,} + {len(data.validation):,} + {len(data.test):,}"
    return f"{data.num_classes} classes, {sizes} rows to train, validate and test on"


def _mnist(part: str, path: Path) -> str:
    content = read_idx(path, MNIST_FILES[part])
    header = bytes([0, 0, 8, content.ndim]) + np.array(content.shape, ">u4").tobytes()
    if hashlib.sha256(header + content.tobytes()).hexdigest() != MNIST_CONTENT[part]:
        raise DataError(f"it is a sound idx file of {len(content):,}, but not the official one")
    return f"the official {len(content):,} {part.split('-')[1]}"


def _cifar(path: Path, columns: tuple[int, ...], official: int) -> str:
    labels = read_records(path, columns)[0][-1]
    if len(labels) != official:
        raise DataError(f"{len(labels):,} images, but the official file has {official:,}")
    # CIFAR-10's training images were dealt into five batches at random; every other file has equally many a class.
    counts = np.bincount(labels, minlength=columns[-1])
    if not path.name.startswith("data_batch") and counts.min() != counts.max():
        raise DataError(f"{counts.min()} to {counts.max()} images per class, not equally many")
    return f"{official:,} images, labels in range"


def _images(source: str, place: Path) -> list[Finding]:
    try:
        listing = list_images(source, place)
    except DataError as error:
        return [Finding(str(place), "damaged", str(error))]
    files = [path for part in listing.files.values() for path in part]

    def look(path: Path) -> Finding:
        if not path.is_file():
            return Finding(str(path), "missing", "it is listed, but not there")
        return _look(path, open_header, path)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        problems = [finding for finding in pool.map(look, files) if finding.status != "ok"]
    return problems or [Finding(str(place), "ok", f"{len(files):,} images of {len(listing.classes)} classes")]
