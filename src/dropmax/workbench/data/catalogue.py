"""The data sets known by name: what they hold, where they are looked for, and where their publishers keep them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dropmax.errors import DataError, unknown
from dropmax.workbench.data.mnist import FILES as MNIST_FILES
from dropmax.workbench.data.mnist import find_mnist


@dataclass(frozen=True)
class Download:
    """One file of a publisher."""

    file: str
    urls: tuple[str, ...]  #: tried in turn
    size: int | None  #: in bytes, where known
    digest: str  #: ``algorithm:hexadecimal``


@dataclass(frozen=True)
class Source:
    """One publisher's release: the folders it is looked for in, the entries to find there, and its downloads."""

    folders: tuple[str, ...]
    entries: tuple[str, ...]
    downloads: tuple[Download, ...]
    unpacked_limit: int  # bytes an archive may unpack to; a little above the true size
    optional: tuple[str, ...] = ()  # entries the set can be read without


@dataclass(frozen=True)
class Known:
    """A data set known by name: its source (None: inside the package), classes and usual split sizes."""

    source: str | None
    classes: int
    sizes: tuple[int, int, int]
    about: str


_MNIST = {
    "train-images-idx3-ubyte.gz": (9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    "train-labels-idx1-ubyte.gz": (28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    "t10k-images-idx3-ubyte.gz": (1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    "t10k-labels-idx1-ubyte.gz": (4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
}
_MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
_AWA2 = "https://cvml.ista.ac.at/AwA2/AwA2-data.zip"
_CUB = "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz?download=1"
_BATCHES = tuple(f"data_batch_{n}.bin" for n in range(1, 6))
_GIGABYTE = 10**9


def _cifar(file: str, size: int, digest: str) -> tuple[Download]:
    return (Download(file, (f"https://www.cs.toronto.edu/~kriz/{file}",), size, f"md5:{digest}"),)


SOURCES: dict[str, Source] = {
    "mnist": Source(
        ("mnist", "MNIST/raw", "."),
        tuple(_MNIST),
        tuple(
            Download(file, tuple(mirror + file for mirror in _MIRRORS), size, f"sha256:{digest}")
            for file, (size, digest) in _MNIST.items()
        ),
        0,
    ),
    "cifar-10": Source(
        ("cifar-10-batches-bin", "."),
        (*_BATCHES, "test_batch.bin", "batches.meta.txt"),
        _cifar("cifar-10-binary.tar.gz", 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530"),
        _GIGABYTE // 4,
        (*_BATCHES[1:], "batches.meta.txt"),
    ),
    "cifar-100": Source(
        ("cifar-100-binary", "."),
        ("train.bin", "test.bin", "fine_label_names.txt", "coarse_label_names.txt"),
        _cifar("cifar-100-binary.tar.gz", 168_513_733, "03b5dce01913d631647c71ecec9e9cb8"),
        _GIGABYTE // 4,
        ("fine_label_names.txt", "coarse_label_names.txt"),
    ),
    "cub": Source(
        ("CUB_200_2011", "."),
        ("images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt", "images"),
        (Download("CUB_200_2011.tgz", (_CUB,), 1_150_585_339, "md5:97eceeb196236b17998738112f37df78"),),
        3 * _GIGABYTE,
    ),
    # Not looked for in ".": AWA2 has the same folder JPEGImages.
    "awa": Source(("Animals_with_Attributes", "AWA"), ("JPEGImages",), (), 0),
    "awa2": Source(
        ("Animals_with_Attributes2", "AWA2", "."),
        ("JPEGImages",),
        (Download("AwA2-data.zip", (_AWA2,), None, "md5:eaa27cf799d5cf55af372356d7281b5e"),),
        20 * _GIGABYTE,
    ),
}

NAMES: dict[str, Known] = {
    "mnist-1k": Known(None, 10, (1_000, 5_000, 10_000), "handwritten digits, 100 per class to train on"),
    "mnist-5k": Known(None, 10, (5_000, 5_000, 10_000), "handwritten digits, 500 per class to train on"),
    "mnist-55k": Known("mnist", 10, (55_000, 5_000, 10_000), "all handwritten digits"),
    "mnist": Known("mnist", 10, (55_000, 5_000, 10_000), "the same as mnist-55k"),
    "cifar-10": Known("cifar-10", 10, (45_000, 5_000, 10_000), "small colour pictures"),
    "cifar-100": Known("cifar-100", 100, (45_000, 5_000, 10_000), "small colour pictures in 20 superclasses"),
    "cifar-100-5k": Known("cifar-100", 100, (5_000, 5_000, 10_000), "the same, 50 per class to train on"),
    "deic-cifar-10": Known("cifar-10", 10, (300, 200, 10_000), "the data-efficient benchmark: 30 + 20 per class"),
    "deic-cifar-100": Known("cifar-100", 100, (3_000, 2_000, 10_000), "the same for CIFAR-100"),
    "cub": Known("cub", 200, (5_395, 599, 5_794), "birds, Caltech-UCSD Birds-200-2011"),
    "awa": Known("awa", 50, (25_177, 2_798, 2_500), "animals, Animals with Attributes, no longer distributed"),
    "awa2": Known("awa2", 50, (31_340, 3_482, 2_500), "animals, Animals with Attributes 2"),
}


def cache_directory() -> Path:
    """Return where caches go: ``$DROPMAX_CACHE``, or ``dropmax`` in the user's cache directory of the platform."""
    chosen = os.environ.get("DROPMAX_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "dropmax"


@contextlib.contextmanager
def cache_folder(kind: str) -> Iterator[Path]:
    """Yield a folder of the cache, made if needed; what the file system refuses inside becomes a DataError."""
    folder = cache_directory() / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        why = error.strerror or error
        raise DataError(
            f"the cache {folder} cannot be used ({why}): name a directory you can write to in DROPMAX_CACHE"
        ) from error


def data_directory(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return where data sets are: the argument, else ``$DROPMAX_DATA``, else ``data`` in the cache directory.

    >>> data_directory("here/data").as_posix()
    'here/data'
    """
    chosen = os.fspath(data_dir) if data_dir is not None else os.environ.get("DROPMAX_DATA")
    return Path(chosen).expanduser() if chosen else cache_directory() / "data"


def source_of(name: str) -> str | None:
    """Return which source the data set ``name`` is read from, or None where it is inside the package."""
    if name not in NAMES:
        raise DataError(unknown("data set", name, NAMES))
    return NAMES[name].source


def find(source: str, data_dir: Path) -> tuple[Path | None, tuple[str, ...]]:
    """Return the folder a source was found in, or None, and the entries missing from it."""
    known = SOURCES[source]
    if source == "mnist":  # its files have several spellings
        files = find_mnist(data_dir)
        missing = tuple(entry for part, entry in zip(MNIST_FILES, known.entries, strict=True) if part not in files)
        return next((path.parent for path in files.values()), None), missing
    for folder in known.folders:
        place = data_dir / folder
        missing = tuple(entry for entry in known.entries if not os.path.exists(place / entry))
        if len(missing) < len(known.entries):
            return place, missing
    return None, known.entries


def withdrawn(source: str, data_dir: Path) -> str:
    """Return what to say about a source that its publisher no longer distributes, where it is missing."""
    known = SOURCES[source]
    return (
        f"the images of {source} are no longer distributed by their publisher: if you have them, put "
        f"{', '.join(known.entries)} in {data_dir / known.folders[0]}; awa2, its successor, can be fetched"
    )


def must_find(name: str, data_dir: Path) -> Path:
    """Return the folder of the source of ``name``, or raise a DataError that says what to put where."""
    source = source_of(name) or "mnist"
    if os.path.exists(data_dir) and not os.access(data_dir, os.R_OK | os.X_OK):
        raise DataError(f"the data directory {data_dir} cannot be read: check its permissions")
    place, _ = find(source, data_dir)
    if place is None:
        known = SOURCES[source]
        if not known.downloads:
            raise DataError(withdrawn(source, data_dir))
        raise DataError(
            f"{name} was not found in {data_dir}: it needs {known.folders[0]}/ with {', '.join(known.entries)} there; "
            f"run `dropmax data fetch {source}`, or name its directory with data_dir or DROPMAX_DATA"
        )
    return place
