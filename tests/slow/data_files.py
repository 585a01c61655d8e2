"""Malformed data of MNIST, CIFAR and CUB, and archives: how to make them, and the call that reads them."""

from __future__ import annotations

import functools
import gzip
import io
import struct
import tarfile
import zipfile
from pathlib import Path
from random import Random

import numpy as np

from dropmax.workbench.data.cifar import read_cifar10, read_cifar100
from dropmax.workbench.data.folders import list_cub, read_listing
from dropmax.workbench.data.mnist import read_mnist
from dropmax.workbench.data.parts import assemble
from dropmax.workbench.data.unpacking import unpack
from tests.slow.damage import damage_bytes, damage_text, deflated
from tests.slow.image_files import pictures

# --- idx: plain and gzipped -------------------------------------------------------------------------------------------


def make_mnist(rng: Random, folder: Path) -> None:
    """Write four images and labels, of which sizes, contents or the packing lie."""
    if rng.random() < 0.003:
        (folder / "images").write_bytes(_gzip_of_zeros(rng.choice((60_000, 340_000, 2**31))))
        (folder / "labels").write_bytes(_gzip_of_zeros(rng.choice((10, 2**28)), dimensions=1))
        return
    for name, sizes in (("images", [4, 28, 28]), ("labels", [4])):
        content = (
            rng.randbytes(int(np.prod(sizes)))
            if name == "images"
            else bytes(rng.randrange(10 + (rng.random() < 0.1)) for _ in range(4))
        )
        if rng.random() < 0.2:
            sizes[rng.randrange(len(sizes))] = rng.choice((0, 1, 3, 5, 27, 65536, 2**31, 2**32 - 1))
        kind, dimensions = rng.choice((8,) * 30 + (0, 9, 13)), rng.choice((len(sizes),) * 30 + (0, 2, 255))
        data = bytes([0, 0, kind, dimensions]) + struct.pack(f">{len(sizes)}I", *sizes) + content
        data = damage_bytes(rng, data) if rng.random() < 0.25 else data
        if rng.random() < 0.5:
            data = gzip.compress(data, rng.choice((0, 1, 9)), mtime=0)
            data += rng.choice((b"",) * 9 + (data, b"junk", bytes(100)))
            data = damage_bytes(rng, data) if rng.random() < 0.25 else data
        (folder / name).write_bytes(data)


def read_mnist_files(folder: Path) -> object:
    """Read them as MNIST's test half."""
    return read_mnist({"t10k-images": folder / "images", "t10k-labels": folder / "labels"}, "t10k")


@functools.cache
def _gzip_of_zeros(images: int, dimensions: int = 3) -> bytes:
    """Return a gzip that unpacks to up to 300 MB, and whose header promises ``images`` or labels."""
    head = bytes([0, 0, 8, dimensions]) + struct.pack(">I", images) + struct.pack(">II", 28, 28) * (dimensions == 3)
    size = min(images * (784 if dimensions == 3 else 1), 300 << 20)
    packed, crc, _ = deflated(head, size)
    return b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff" + packed + struct.pack("<II", crc, (size + len(head)) % 2**32)


# --- CIFAR ------------------------------------------------------------------------------------------------------------


def make_cifar(rng: Random, folder: Path) -> None:
    """Write a binary release of a few records a file."""
    columns: tuple[int, ...]
    if rng.random() < 0.5:
        files, columns, names = ["data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"], (10,), ["batches.meta.txt"]
    else:
        files, columns = ["train.bin", "test.bin"], (20, 100)
        names = ["fine_label_names.txt", "coarse_label_names.txt"]
    pixels = rng.randbytes(3072)
    for name in files:
        rows = []
        for row in range(rng.choice((0, 1, 3, 10, 20, 100, 100, 100))):
            label = (row * 7) % (columns[-1] + (rng.random() < 0.001))
            labels = [label] if len(columns) == 1 else [label % 20, label]
            rows.append(bytes(labels) + pixels)
        data = b"".join(rows)
        (folder / name).write_bytes(damage_bytes(rng, data) if rng.random() < 0.25 else data)
    for name, count in zip(names, columns[::-1], strict=False):
        text = "\n".join(f"class {k}" for k in range(count))
        (folder / name).write_bytes(damage_text(rng, text) if rng.random() < 0.3 else text.encode())


def read_cifar(folder: Path) -> object:
    """Read it and make splits."""
    read = read_cifar100 if (folder / "train.bin").exists() else read_cifar10
    return assemble("cifar", read(folder), validation_size=0)


# --- CUB --------------------------------------------------------------------------------------------------------------


def make_cub(rng: Random, folder: Path) -> None:
    """Write CUB's four tables, and now and then the images too."""
    with_images = rng.random() < 0.1
    images = [f"00{k % 3 + 1}.Bird_{k % 3}/Bird_{k}.jpg" for k in range(9)]
    tables = {
        "classes.txt": [f"{k} 00{k}.Bird_{k - 1}" for k in (1, 2, 3)],
        "images.txt": [f"{k + 1} {name}" for k, name in enumerate(images)],
        "image_class_labels.txt": [f"{k + 1} {k % 3 + 1}" for k in range(9)],
        "train_test_split.txt": [f"{k + 1} {int(k < 6)}" for k in range(9)],
    }
    for name, lines in tables.items():
        text = "\n".join(lines) + "\n"
        (folder / name).write_bytes(damage_text(rng, text, most=2) if rng.random() < 0.4 else text.encode())
    for k, name in enumerate(images if with_images else ()):
        place = folder / "images" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        data = pictures()[f"colour.{rng.choice(('jpg', 'png'))}"]
        place.write_bytes(damage_bytes(rng, data) if k == 0 and rng.random() < 0.3 else data)


def read_cub(folder: Path) -> object:
    """List it, and decode it where there is something to decode."""
    listing = list_cub(folder)
    return assemble("cub", read_listing(listing, 8)) if (folder / "images").exists() else listing


# --- archives ---------------------------------------------------------------------------------------------------------


def make_archive(rng: Random, folder: Path) -> None:
    """Write an archive of a folder, with members that climb, link, or claim sizes, and damage it."""
    buffer = io.BytesIO()
    names = [
        "set/a.txt",
        "set/deep/b.txt",
        "set/deep",
        "../evil",
        "/tmp/evil",
        "set/../../evil",
        "set\\..\\evil",
        "set",
    ]
    names += ["set/\x1b[31m", "set/a.txt/c", "other/d", "./set/e", "", ".", "set/\x00", "C:evil", "set/" + "n" * 300]
    chosen = [names[min(rng.randrange(len(names)), rng.randrange(len(names)))] for _ in range(rng.randint(1, 5))]
    if rng.random() < 0.5:
        with tarfile.open(fileobj=buffer, mode=rng.choice(("w:gz", "w:gz", "w", "w:bz2", "w:xz"))) as tar:
            for name in chosen:
                info = tarfile.TarInfo(name)
                info.type = rng.choice((tarfile.REGTYPE,) * 12 + (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE))
                info.linkname = rng.choice(("a.txt", "/etc/passwd", "../.."))
                info.size = rng.choice((0, 5, 2000))
                tar.addfile(info, io.BytesIO(bytes(info.size)))
        path = folder / "a.tgz"
    else:
        with zipfile.ZipFile(buffer, "w") as archive:
            for name in dict.fromkeys(chosen):
                entry = zipfile.ZipInfo(name)
                entry.external_attr = rng.choice((0o100644, 0o100644, 0o120777, 0o010644)) << 16
                entry.compress_type = rng.choice((0, 8, 8, 12, 14))
                archive.writestr(entry, bytes(rng.choice((0, 5, 2_000_000))))
        path = folder / "a.zip"
    data = buffer.getvalue()
    path.write_bytes(damage_bytes(rng, data) if rng.random() < 0.5 else data)
    (folder / "target").mkdir()


def read_archive(folder: Path) -> object:
    """Unpack it, and see that nothing is outside the one folder it may fill."""
    (archive,) = (path for path in folder.iterdir() if path.is_file())
    try:
        return unpack(archive, "set", folder / "target", 1_000_000)
    finally:
        there = {path.name for path in folder.iterdir()} | {path.name for path in (folder / "target").iterdir()}
        if not there <= {archive.name, "target", "set"} or any(p.is_symlink() for p in folder.rglob("*")):
            raise AssertionError(f"unpacking left {there - {archive.name, 'target', 'set'}} or a link")
