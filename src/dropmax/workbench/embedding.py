"""A folder of photographs or a table of sentences becomes a file of features, once, in steps that can be resumed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray

from dropmax.errors import DataError, InvalidValue
from dropmax.workbench.backbones import Backbone
from dropmax.workbench.data.catalogue import cache_folder
from dropmax.workbench.data.folders import Listing, list_folder
from dropmax.workbench.data.images import centre_crop, content_key, decode
from dropmax.workbench.data.tables import TextTable, read_texts
from dropmax.workbench.files import check_place, filling, write_atomically
from dropmax.workbench.terminal import progress

_BATCH = 32  # images per step; texts go in batches of 32 times as many
_TEXTS = 1024
_SHOWN = 300


@dataclass(frozen=True)
class Source:
    """What is to be embedded: items (paths or texts), and what is known about each."""

    kind: str  #: "images" or "text"
    items: Sequence[Any]
    names: Sequence[str]  #: file names, or ids of rows
    labels: Sequence[int]
    splits: Sequence[str]  #: "train", "validation" or "test"
    classes: tuple[str, ...]
    key: str  #: a digest of the content
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Embedded:
    """What :func:`embed` did: the file it wrote, how many rows it holds, and the items that could not be read."""

    path: Path
    rows: int
    unreadable: dict[str, str]


def name_some(unreadable: dict[str, str], most: int = 20) -> list[str]:
    """Return a line for each item that was left out, and after ``most`` of them how many more there are."""
    lines = [f"left out {name}: {reason}" for name, reason in unreadable.items()]
    return lines[:most] + [f"and {len(lines) - most:,} more were left out"] * (len(lines) > most)


def find_source(
    path: Path, *, text: str | None, label: str = "label", id_column: str | None = None, split_column: str | None = None
) -> Source:
    """Return the images of a folder, or the rows of a table whose column ``text`` holds sentences."""
    if path.is_dir():
        if text is not None:
            raise InvalidValue(f"{path} is a folder of images: --text is for tables")
        return _image_source(list_folder(path))
    if not path.exists():
        raise DataError(f"{path} does not exist: give a folder of images or a table with a column of texts")
    if text is None:
        raise InvalidValue(f"{path} is a table: say which column holds the texts with --text COLUMN")
    table = read_texts(path, text, label_column=label, id_column=id_column, split_column=split_column)
    return _text_source(path, table)


def _image_source(listing: Listing) -> Source:
    items = [path for paths in listing.files.values() for path in paths]
    names = [path.relative_to(listing.root).as_posix() for path in items]
    labels = [label for part in listing.files for label in listing.labels[part]]
    splits = [part for part, paths in listing.files.items() for _ in paths]
    return Source("images", items, names, labels, splits, listing.classes, content_key(items, listing.root))


def _text_source(path: Path, table: TextTable) -> Source:
    """Return the rows of a table; classes are the distinct labels in sorted order."""
    spelling = {"val": "validation", "valid": "validation", "dev": "validation"}
    splits = [spelling.get(name.lower(), name.lower()) for name in table.splits] or ["train"] * len(table.texts)
    for name, split in zip(table.ids, splits, strict=True):
        if split not in ("train", "validation", "test"):
            raise DataError(f"{path}, {name}: the split is {split!r}, but must be train, validation or test")
    classes = tuple(sorted(set(table.labels)))
    if len(classes) < 2:
        only = f"the one class {classes[0]!r}" if classes else "no labels"
        raise DataError(f"{path} has {only}: a classifier needs at least two classes")
    number = {name: k for k, name in enumerate(classes)}
    digest = hashlib.sha256(json.dumps([table.texts, table.labels, splits]).encode()).hexdigest()
    labels = [number[name] for name in table.labels]
    return Source("text", table.texts, table.ids, labels, splits, classes, digest, list(table.left_out))


def embed(source: Source, backbone: Backbone, out: Path) -> Embedded:
    """Write the features of a source to ``out`` (.npz), resuming what a killed call left in ``out.partial/``.

    The file holds ``x`` (float32), ``y``, ``split``, ``classes``, ``names``, for texts ``text``, and ``backbone``: a
    description of where the features came from. Images that cannot be read are left out and reported.
    """
    if out.exists():
        raise DataError(f"{out} exists: choose another file with --out, or delete it first")
    check_place(out.parent)
    store = _Store(out.with_name(out.name + ".partial"), source.key + backbone.origin.to_json())
    unit = "images" if source.kind == "images" else "texts"
    with progress(f"embedding {len(source.items):,} {unit}", len(source.items), unit, done=store.done) as advance:
        for rows, batch, failed in _batches(source, backbone, store.done):
            good = [row for row in rows if source.names[row] not in failed]
            features = backbone(batch) if good else None
            store.add(rows, good, None if features is None else features.numpy(), failed)
            advance(len(rows))
    if not store.kept:
        first = next(iter(store.failed.values()))
        raise DataError(f"none of the {len(source.items):,} images could be read; the first: {first}")
    _write(out, source, backbone, store)
    shutil.rmtree(store.folder)
    return Embedded(out, len(store.kept), {**dict.fromkeys(source.left_out, "no text"), **store.failed})


def cached_features(source: Source, backbone: Backbone) -> tuple[Path, dict[str, str]]:
    """Return the file with the features of a source, from the cache where they are there; and what was left out."""
    key = hashlib.sha256((source.key + backbone.origin.to_json()).encode()).hexdigest()[:40]
    with cache_folder("features") as folder, FileLock(folder / f"{key}.lock"):
        file, note = folder / f"{key}.npz", folder / f"{key}.json"
        if not (file.is_file() and note.is_file()):
            file.unlink(missing_ok=True)
            write_atomically(note, json.dumps(embed(source, backbone, file).unreadable))
        found: dict[str, str] = json.loads(note.read_text(encoding="utf-8"))
    return file, found


def _batches(source: Source, backbone: Backbone, start: int) -> Iterator[tuple[range, Any, dict[str, str]]]:
    """Yield rows, what the backbone takes for them, and what could not be read; images are decoded one batch ahead."""
    total = len(source.items)
    if source.kind == "text":
        for first in range(start, total, _TEXTS):
            yield range(first, min(first + _TEXTS, total)), list(source.items[first : first + _TEXTS]), {}
        return
    # Threads, not processes: Pillow decodes and scales outside Python's lock.
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:

        def submit(first: int) -> list[Future[NDArray[np.uint8]]]:
            return [pool.submit(image_for, path, backbone) for path in source.items[first : first + _BATCH]]

        waiting = submit(start)
        for first in range(start, total, _BATCH):
            current, waiting = waiting, submit(first + _BATCH)
            rows = range(first, min(first + _BATCH, total))
            images, failed = [], {}
            for row, future in zip(rows, current, strict=True):
                if (error := future.exception()) is None:
                    images.append(future.result())
                elif isinstance(error, DataError):
                    failed[source.names[row]] = str(error)
                else:
                    raise error
            yield rows, torch.from_numpy(np.stack(images)) if images else None, failed


def image_for(path: Path, backbone: Backbone) -> NDArray[np.uint8]:
    """Decode one image as a backbone takes it: short side scaled, then the centre square."""
    image: NDArray[np.uint8] = centre_crop(decode(path, backbone.stored_size), backbone.image_size, backbone.image_size)
    return image


class _Store:
    """Finished batches on disk: features in one growing file of float32, and a journal of what became of each row."""

    def __init__(self, folder: Path, plan: str) -> None:
        self.folder = folder
        self.done = self.width = 0
        self.kept: list[int] = []  #: the rows that have features
        self.failed: dict[str, str] = {}
        digest = hashlib.sha256(plan.encode()).hexdigest()
        if (folder / "plan").is_file() and (folder / "plan").read_text() == digest:
            self._resume()
        else:
            shutil.rmtree(folder, ignore_errors=True)  # of other content, or another backbone
            folder.mkdir(parents=True)
            (folder / "plan").write_text(digest)

    def _resume(self) -> None:
        journal = self.folder / "journal.jsonl"
        for line in journal.read_text().splitlines() if journal.exists() else []:
            try:
                entry = json.loads(line)
            except ValueError:  # the line a killed process was writing
                break
            self._count(entry)
        features = self.folder / "features.f32"
        if features.exists():
            os.truncate(features, 4 * self.width * len(self.kept))

    def _count(self, entry: dict[str, Any]) -> None:
        self.done, self.width = entry["done"], entry["width"]
        self.kept += entry["kept"]
        self.failed |= entry["failed"]

    def add(self, rows: range, good: list[int], features: NDArray[np.float32] | None, failed: dict[str, str]) -> None:
        """Append features first and the journal's line after: a killed process leaves features that are ignored."""
        if features is not None:
            if self.width and features.shape[1] != self.width:
                raise DataError(f"the backbone returned {features.shape[1]} features after {self.width} before")
            with open(self.folder / "features.f32", "ab") as stream:
                stream.write(np.ascontiguousarray(features, np.float32).tobytes())
        width = self.width if features is None else features.shape[1]
        entry = {"done": rows.stop, "width": width, "kept": good, "failed": failed}
        with open(self.folder / "journal.jsonl", "a") as stream:
            stream.write(json.dumps(entry) + "\n")
        self._count(entry)


def _write(out: Path, source: Source, backbone: Backbone, store: _Store) -> None:
    kept = store.kept
    arrays: dict[str, Any] = {
        "x": np.memmap(store.folder / "features.f32", np.float32, "r", shape=(len(kept), store.width)),
        "y": np.array([source.labels[row] for row in kept], np.int64),
        "split": np.array([source.splits[row] for row in kept]),
        "classes": np.array(source.classes),
        "names": np.array([source.names[row] for row in kept]),
        "backbone": np.array(backbone.origin.to_json()),
    }
    if source.kind == "text":
        # For people to read; an array gives every row the memory of the longest, so long texts are cut.
        arrays["text"] = np.array([source.items[row][:_SHOWN] for row in kept])
    with filling(out) as place, open(place, "wb") as stream:
        np.savez(stream, **arrays)
