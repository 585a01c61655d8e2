"""The binary releases of CIFAR-10 (label, 3072 pixels) and CIFAR-100 (coarse label, fine label, 3072 pixels)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dropmax.errors import DataError
from dropmax.workbench.data.dataset import Part, Parts
from dropmax.workbench.data.labels import read_lines, reading

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_PICKLES = {"cifar-10": "cifar-10-batches-py", "cifar-100": "cifar-100-python"}


def read_records(path: Path, ranges: tuple[int, ...]) -> tuple[list[NDArray[np.int64]], NDArray[np.uint8]]:
    """Read a CIFAR binary file: its label columns, each below the number given for it, and images (N, 3, 32, 32)."""
    width = len(ranges) + 3072
    with reading(path):
        size = path.stat().st_size
        content = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)  # an empty file cannot be mapped
    if size == 0 or size % width:
        raise DataError(
            f"{path} holds {size:,} bytes, which is not a whole number of records of {width} bytes: "
            "it is cut short, or not a CIFAR binary file"
        )
    records = np.asarray(content).reshape(-1, width)
    labels = [records[:, column].astype(np.int64) for column in range(len(ranges))]
    for values, limit in zip(labels, ranges, strict=True):
        if values.max() >= limit:
            row = int(np.argmax(values >= limit))
            raise DataError(f"{path} holds the label {values[row]} in record {row:,}, but labels are 0 to {limit - 1}")
    return labels, np.array(records[:, len(ranges) :]).reshape(-1, 3, 32, 32)


def read_cifar10(folder: Path) -> Parts:
    """Read ``data_batch_1.bin`` .. ``data_batch_5.bin`` and ``test_batch.bin``; missing batches become a note."""
    batches = [folder / f"data_batch_{n}.bin" for n in range(1, 6)]
    present = [path for path in batches if path.is_file()]
    for needed in (batches[0], folder / "test_batch.bin"):
        if not needed.is_file():
            raise DataError(f"{folder} has no {needed.name}: get the whole release with `dropmax data fetch cifar-10`")
    notes: list[str] = []
    read = [_read(path, (10,), 10_000, notes) for path in present]
    labels = np.concatenate([columns[0] for columns, _ in read])
    images = np.concatenate([pixels for _, pixels in read])
    (test_labels,), test_images = _read(folder / "test_batch.bin", (10,), 10_000, notes)
    if len(present) < len(batches):
        missing = ", ".join(path.name for path in batches if path not in present)
        notes.append(f"only {len(labels):,} of the 50,000 training images of CIFAR-10: {missing} missing")
    classes = _names(folder / "batches.meta.txt", 10) or CIFAR10_CLASSES
    return Parts(Part(images, labels), classes, test=Part(test_images, test_labels), notes=tuple(notes))


def read_cifar100(folder: Path) -> Parts:
    """Read ``train.bin`` and ``test.bin`` with their fine labels; the coarse ones name the superclasses."""
    notes: list[str] = []
    (coarse, fine), images = _read(folder / "train.bin", (20, 100), 50_000, notes)
    (test_coarse, test_fine), test_images = _read(folder / "test.bin", (20, 100), 10_000, notes)
    superclass = np.full(100, -1)
    superclass[fine] = coarse
    for path, coarse_labels, fine_labels in (("train.bin", coarse, fine), ("test.bin", test_coarse, test_fine)):
        wrong = superclass[fine_labels] != coarse_labels
        if wrong.any() and (superclass[fine_labels] >= 0).all():
            row = int(np.argmax(wrong))
            raise DataError(
                f"{folder / path} puts class {fine_labels[row]} in superclass {coarse_labels[row]} in record {row:,}, "
                f"and elsewhere in {superclass[fine_labels[row]]}: the file is damaged"
            )
    names = _names(folder / "fine_label_names.txt", 100)
    if names is None:
        notes.append("fine_label_names.txt is missing, so the classes are named by number")
    return Parts(
        Part(images, fine),
        names or tuple(map(str, range(100))),
        test=Part(test_images, test_fine),
        coarse=tuple(superclass.tolist()),
        coarse_classes=_names(folder / "coarse_label_names.txt", 20),
        notes=tuple(notes),
    )


def refuse_pickles(name: str, data_dir: Path) -> None:
    """Raise where only the "python version" of CIFAR is there: it is made of pickles, and loading one runs its code."""
    for place in (data_dir / _PICKLES[name], data_dir):
        if (place / "batches.meta").is_file() or ((place / "meta").is_file() and (place / "train").is_file()):
            raise DataError(
                f"{place} is the python release of {name}, made of pickles, which dropmax never loads: "
                f"get the binary release with `dropmax data fetch {name}`"
            )


def _read(
    path: Path, ranges: tuple[int, ...], official: int, notes: list[str]
) -> tuple[list[NDArray[np.int64]], NDArray[np.uint8]]:
    """Read a file, and note where it does not hold as many images as the official one."""
    labels, images = read_records(path, ranges)
    if len(images) != official:
        notes.append(f"{path.name} holds {len(images):,} images, not the official {official:,}")
    return labels, images


def _names(path: Path, count: int) -> tuple[str, ...] | None:
    if not path.exists():
        return None
    names = tuple(line.strip() for line in read_lines(path) if line.strip())
    if len(names) != count:
        raise DataError(f"{path} holds {len(names)} class names, but there are {count} classes")
    return names
