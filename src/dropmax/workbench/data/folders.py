"""Images in folders: any folder with one sub-folder per class, and the layouts of AWA, AWA2 and CUB-200-2011."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np

from dropmax.errors import DataError
from dropmax.workbench.data.dataset import TEST_SEED, Part, Parts, balanced_subset, spell
from dropmax.workbench.data.images import DEFAULT_IMAGE_SIZE, SUFFIXES, decoded, short_sides, stored_size
from dropmax.workbench.data.labels import read_lines, reading

_PARTS = ("train", "validation", "test")
AWA_TEST_A_CLASS = 50
AWA_IMAGES = 30_475


@dataclass(eq=False)
class Listing:
    """Image files and labels of each part ("train", "validation", "test"), before anything is decoded."""

    root: Path
    classes: tuple[str, ...]
    files: dict[str, list[Path]] = field(default_factory=lambda: {part: [] for part in _PARTS})
    labels: dict[str, list[int]] = field(default_factory=lambda: {part: [] for part in _PARTS})
    notes: list[str] = field(default_factory=list)

    def add(self, part: str, path: Path, label: int) -> None:
        """Append one image to a part."""
        self.files[part].append(path)
        self.labels[part].append(label)


def read_listing(listing: Listing, image_size: int | None = None) -> Parts:
    """Decode a listing, or open its cache, into images stored at 72/64 of ``image_size`` (64 by default)."""
    crop = DEFAULT_IMAGE_SIZE if image_size is None else image_size
    everything = [path for files in listing.files.values() for path in files]
    images = decoded(everything, listing.root, stored_size(crop))
    parts: dict[str, Part | None] = {}
    start = 0
    for part, labels in listing.labels.items():  # one array, cut into three: each part stays memory-mapped
        stop = start + len(labels)
        parts[part] = Part(images[start:stop], np.array(labels, np.int64)) if labels else None
        start = stop
    assert parts["train"] is not None
    return Parts(
        parts["train"], listing.classes, parts["validation"], parts["test"], crop,
        notes=(*listing.notes, *_enlarged(everything, crop, image_size is None)),
        names=[path.relative_to(listing.root).as_posix() for path in listing.files["train"]],
    )  # fmt: skip


def _enlarged(files: Sequence[Path], crop: int, is_default: bool) -> list[str]:
    sides = short_sides(files)
    small = [side for side in sides if side < crop]
    if not small:
        return []
    which = f"short sides of {min(small)} to {max(small)} pixels" if min(small) < max(small) else f"{small[0]} pixels"
    share = "all" if len(small) == len(sides) else f"{len(small)} of {len(sides)}"
    advice = f"; --set data.image_size={max(8, min(small))} keeps their size" if is_default else ""
    return [f"small images ({which}; {share} of {len(sides)} looked at) are enlarged to {crop} x {crop}{advice}"]


def list_folder(root: Path, known: Sequence[str] = ()) -> Listing:
    """List ``root/<class>/*.jpg``, or ``root/{train,val,test}/<class>/*.jpg`` where ``root/train`` exists.

    Images are in the order of their names, at any depth below their class; hidden files are passed over, and others
    noted. With ``known`` classes one folder will do: its images are to be answered, not learnt from.
    """
    folders = {path.name: path for path in _folders(root)}
    parts = {"train": root}
    if "train" in folders:
        if "val" in folders:
            folders["validation"] = folders["val"]
        parts = {part: folders[part] for part in _PARTS if part in folders}
    classes = tuple(path.name for path in _folders(parts["train"]))
    if not classes:
        raise DataError(
            f"{parts['train']} has no folders in it: one folder per class, with its images inside, is needed"
        )
    if len(classes) < 2 and not known:
        raise DataError(f"{parts['train']} has the one class {classes[0]!r}: a classifier needs at least two")
    for name in classes:
        if any("\ud800" <= c <= "\udfff" for c in name):  # what Python makes of bytes that are no UTF-8
            raise DataError(f"{parts['train']} has the class {name!r}, which is not text: rename that folder")
    listing, others = Listing(root, classes), []
    for part, place in parts.items():
        for folder in _folders(place):
            if folder.name not in classes:
                raise DataError(f"{folder} is a class that is not in training: {parts['train']} has no such folder")
            images, rest = _images(folder)
            if not images:
                raise DataError(f"{folder} has no images in it: add some, or remove the folder")
            others += rest
            for path in images:
                listing.add(part, path, classes.index(folder.name))
    if others:
        listing.notes.append(
            f"{len(others):,} files are not images by their suffix and were left out: "
            + spell([path.relative_to(root).as_posix() for path in others], 3)
        )
    return listing


def list_awa(folder: Path) -> Listing:
    """List the first release of Animals with Attributes, which has the layout of :func:`list_awa2`.

    AWA2, whose images have names with five digits instead of four, is refused: its numbers are not the paper's.
    """
    listing = list_awa2(folder)
    files = [path for part in listing.files.values() for path in part]
    second = next((path for path in files if re.fullmatch(r".*_\d{5}", path.stem)), None)
    if second is not None:
        raise DataError(f"{second} is an image of AWA2, not of AWA: load it as awa2")
    if len(files) != AWA_IMAGES:
        listing.notes.append(f"AWA has {AWA_IMAGES:,} images, and {len(files):,} were found")
    return listing


def list_awa2(folder: Path) -> Listing:
    """List Animals with Attributes 2: ``JPEGImages/<class>/*.jpg``, 50 test images per class, whatever the seed."""
    everything = list_folder(folder / "JPEGImages")
    labels = np.array(everything.labels["train"], np.int64)
    counts = np.bincount(labels)
    if counts.min() <= AWA_TEST_A_CLASS:
        short = everything.classes[int(counts.argmin())]
        raise DataError(
            f"{folder / 'JPEGImages' / short} has {counts.min()} images, but {AWA_TEST_A_CLASS} per class are for "
            "testing and some must be left to train on"
        )
    names = tuple(name.replace("+", " ") for name in everything.classes)
    listing = Listing(everything.root, names, notes=everything.notes)
    test = set(balanced_subset(labels, AWA_TEST_A_CLASS * len(counts), TEST_SEED).tolist())
    for row, (path, label) in enumerate(zip(everything.files["train"], everything.labels["train"], strict=True)):
        listing.add("test" if row in test else "train", path, label)
    return listing


def list_cub(folder: Path) -> Listing:
    """List CUB-200-2011 by its own tables: images.txt, image_class_labels.txt, train_test_split.txt, classes.txt."""
    names = ("classes", "images", "image_class_labels", "train_test_split")
    classes, images, labels, split = (_table(folder / f"{name}.txt") for name in names)
    for path, table in (("image_class_labels.txt", labels), ("train_test_split.txt", split)):
        if table.keys() != images.keys():
            stray = sorted(table.keys() ^ images.keys(), key=lambda number: (len(number), number))
            raise DataError(
                f"{folder / path} and images.txt do not list the same images: {spell(stray)} is in one only"
            )
    index = {number: k for k, number in enumerate(classes)}
    # "001.Black_footed_Albatross" is a number, a full stop and a name.
    listing = Listing(folder, tuple(name.split(".", 1)[-1].replace("_", " ") for name in classes.values()))
    for number, name in images.items():
        if labels[number] not in index:
            raise DataError(
                f"{folder / 'image_class_labels.txt'} gives image {number} the unknown class {labels[number]}"
            )
        if split[number] not in ("0", "1"):
            raise DataError(f"{folder / 'train_test_split.txt'} gives image {number} {split[number]!r}, not 0 or 1")
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts or "\\" in name or "\0" in name:
            raise DataError(f"{folder / 'images.txt'} names {name!r}, which is outside its images folder")
        listing.add("train" if split[number] == "1" else "test", folder / "images" / relative, index[labels[number]])
    return listing


def _table(path: Path) -> dict[str, str]:
    """Read lines of a key and a value, in their order."""
    table: dict[str, str] = {}
    for number, line in enumerate(read_lines(path), 1):
        fields = line.split()
        if len(fields) != 2:
            raise DataError(f"{path}, line {number}: expected a number and a value, not {line[:60]!r}")
        if fields[0] in table:
            raise DataError(f"{path}, line {number}: {fields[0]} is listed twice")
        table[fields[0]] = fields[1]
    if not table:
        raise DataError(f"{path} is empty")
    return table


def _folders(root: Path) -> list[Path]:
    with reading(root):
        return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _images(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the image files below a folder, and the files that are something else."""

    def unreadable(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error

    images: list[Path] = []
    others: list[Path] = []
    for place, _, names in os.walk(folder, onerror=unreadable):
        for name in names:
            if not name.startswith("."):
                path = Path(place, name)
                (images if path.suffix.lower() in SUFFIXES else others).append(path)
    return sorted(images), sorted(others)
