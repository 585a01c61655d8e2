"""Malformed data: MNIST, CIFAR, CUB, archives, pictures and tables; how to make each, and the call that reads it."""

from __future__ import annotations

import functools
import gzip
import io
import math
import shutil
import struct
import zipfile
import zlib
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from dropmax.workbench.data import load
from dropmax.workbench.data.cifar import read_cifar10, read_cifar100
from dropmax.workbench.data.dataset import assemble
from dropmax.workbench.data.download import unpack
from dropmax.workbench.data.folders import list_cub, read_listing
from dropmax.workbench.data.images import decode
from dropmax.workbench.data.mnist import read_mnist
from dropmax.workbench.data.npz import read_npz_rows
from dropmax.workbench.data.tables import read_rows
from tests.slow.damage import INTEGERS, damage_bytes, damage_text
from tests.workbench.data.layouts import idx_bytes, write_cifar, write_cub


def maybe(rng: Random, chance: float, data: bytes) -> bytes:
    """Return the data, by chance damaged."""
    return damage_bytes(rng, data) if rng.random() < chance else data


# --- idx: plain and gzipped -------------------------------------------------------------------------------------


def make_mnist(rng: Random, folder: Path) -> None:
    """Write four images and labels, plain or gzipped, of which sizes, contents or the packing lie."""
    for name, array in (("images", np.zeros((4, 28, 28))), ("labels", np.arange(4) * rng.choice((1, 1, 1, 9)))):
        data = maybe(rng, 0.4, idx_bytes(array))
        if rng.random() < 0.5:
            data = gzip.compress(data, mtime=0)
            data = maybe(rng, 0.25, data + rng.choice((b"",) * 9 + (data, b"junk", bytes(100))))
        (folder / name).write_bytes(data)


def read_mnist_files(folder: Path) -> object:
    """Read them as MNIST's test half."""
    return read_mnist({"t10k-images": folder / "images", "t10k-labels": folder / "labels"}, "t10k")


def gzip_of_zeros(images: int, dimensions: int = 3) -> bytes:
    """Return a gzip that unpacks to up to 300 MB, and whose header promises ``images`` or labels."""
    head = bytes([0, 0, 8, dimensions]) + struct.pack(">I", images) + struct.pack(">II", 28, 28) * (dimensions == 3)
    megabytes, rest = divmod(min(images * (784 if dimensions == 3 else 1), 300 << 20), 1 << 20)
    return gzip.compress(head + bytes(rest)) + gzip.compress(bytes(1 << 20)) * megabytes


# --- CIFAR and CUB ----------------------------------------------------------------------------------------------


def make_cifar(rng: Random, folder: Path) -> None:
    """Write a binary release of a few records per file."""
    files, names = rng.choice((
        (("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"), {"batches.meta.txt": 10}),
        (("train.bin", "test.bin"), {"fine_label_names.txt": 100, "coarse_label_names.txt": 20}),
    ))  # fmt: skip
    for name in files:
        labels = [(k % 10,) if len(names) == 1 else (k % 20, k) for k in range(rng.choice((0, 1, 10, 100, 100)))]
        write_cifar(folder / name, labels)
        (folder / name).write_bytes(maybe(rng, 0.25, (folder / name).read_bytes()))
    for name, count in names.items():
        text = "\n".join(f"class {k}" for k in range(count))
        (folder / name).write_bytes(damage_text(rng, text) if rng.random() < 0.3 else text.encode())


def read_cifar(folder: Path) -> object:
    """Read it and make splits."""
    read = read_cifar100 if (folder / "train.bin").exists() else read_cifar10
    return assemble("cifar", read(folder), validation_size=0)


def make_cub(rng: Random, folder: Path) -> None:
    """Write CUB's four tables, and now and then the images too."""
    write_cub(folder, a_class=3)
    for table in folder.glob("*.txt"):
        if rng.random() < 0.4:
            table.write_bytes(damage_text(rng, table.read_text(), most=2))
    if rng.random() < 0.9:
        shutil.rmtree(folder / "images")
    else:
        image = rng.choice(sorted((folder / "images").rglob("*.jpg")))
        image.write_bytes(maybe(rng, 0.3, image.read_bytes()))


def read_cub(folder: Path) -> object:
    """List it, and decode it where there is something to decode."""
    listing = list_cub(folder)
    return assemble("cub", read_listing(listing, 8)) if (folder / "images").exists() else listing


# --- archives ---------------------------------------------------------------------------------------------------


def make_archive(rng: Random, folder: Path) -> None:
    """Write a damaged archive of a folder; test_download.py has the members that climb, link or claim sizes."""
    write_folder(folder / "made" / "set", 2)
    kind = rng.choice(("gztar", "tar", "bztar", "xztar", "zip", "zip", "zip"))
    archive = Path(shutil.make_archive(str(folder / "a"), kind, folder / "made"))
    archive.write_bytes(maybe(rng, 0.8, archive.read_bytes()))
    shutil.rmtree(folder / "made")
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


# --- pictures ---------------------------------------------------------------------------------------------------


@functools.cache
def pictures() -> dict[str, bytes]:
    """Return small sound pictures of every format that is read, by name."""
    colour = Image.fromarray(np.random.default_rng(0).integers(0, 256, (18, 24, 3)).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    options: dict[str, dict[str, Any]] = {
        "colour.jpg": {"exif": exif},
        "progressive.jpg": {"progressive": True},
        "colour.gif": {"save_all": True, "append_images": [colour.convert("P")]},
        "packed.tif": {"compression": "tiff_lzw"},
        "deflated.tif": {"compression": "tiff_adobe_deflate"},
    }
    modes = {"palette.png": "P", "clear.png": "LA", "deep.png": "I;16", "bits.png": "1", "print.jpg": "CMYK"}
    modes |= {"colour.gif": "P", "grey.pgm": "L"}
    found = {}
    for name in ("colour.png", "colour.bmp", "colour.webp", "plain.tif", "colour.ppm", *modes, *options):
        kind = {"jpg": "JPEG", "tif": "TIFF", "pgm": "PPM"}.get(name[-3:], name.rpartition(".")[2].upper())
        buffer = io.BytesIO()
        colour.convert(modes.get(name, "RGB")).save(buffer, kind, **options.get(name, {}))
        found[name] = buffer.getvalue()
    return found


def make_image(rng: Random, folder: Path) -> None:
    """Write one picture, whose header, chunks or bytes lie; or a folder of them with one of that kind."""
    name = rng.choice(list(pictures()))
    data = rng.choice((_lying_png, _lying_jpeg, *[lambda rng: damage_bytes(rng, pictures()[name])] * 6))(rng)
    if rng.random() < 0.2:
        name = name.rpartition(".")[0] + rng.choice((".jpg", ".png", ".gif", ".tiff", ".JPEG"))
    if rng.random() < 0.06:
        folder = write_folder(folder / "set", 3) / "dog"
    (folder / name).write_bytes(data)


def write_folder(folder: Path, each: int) -> Path:
    """Write a folder of sound pictures of cats and dogs."""
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for k in range(each):
            (folder / label / f"{k}.png").write_bytes(pictures()["colour.png"])
    return folder


def read_image(folder: Path) -> object:
    """Decode the picture, or load the folder."""
    (path,) = folder.iterdir()
    return load(path, image_size=8) if path.is_dir() else decode(path, 16)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, depth: int, colour: int, packed: bytes, more: bytes = b"") -> bytes:
    """Return a PNG whose checksums are right, however wrong its contents are."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    end = _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + more + end


def _lying_png(rng: Random) -> bytes:
    width, height = (rng.choice((0, 1, 8, 24, 5000, 9000, 65535, 2**31 - 1, 2**32 - 1)) for _ in range(2))
    depth, colour = rng.choice((1, 2, 4, 8, 16, 3, 0)), rng.choice((0, 2, 3, 4, 6, 1, 7))
    kind, content = rng.choice((
        (b"PLTE", rng.randbytes(rng.choice((0, 3, 7, 768, 3000)))),
        (b"zTXt", b"words\x00\x00" + zlib.compress(bytes(1 << 20)) * rng.choice((1, 100))),
        (b"iCCP", b"profile\x00\x00" + zlib.compress(bytes(10 << 20), 1)),
        (b"tRNS", rng.randbytes(rng.choice((0, 1, 6, 300)))),
        (b"acTL", struct.pack(">II", rng.choice(INTEGERS) % 2**32, 0)),
        (b"eXIf", b"II*\x00" + rng.randbytes(40)),
    ))  # fmt: skip
    packed = zlib.compress(bytes(rng.choice((0, 100, 100_000))))
    return png(width, height, depth, colour, packed, _chunk(kind, content))


def png_of_zeros(width: int, height: int, kind: str = "colour") -> bytes:
    """Return a small PNG of very many pixels: of colours, of a palette, or of 16-bit grey."""
    depth, colour, size = {"colour": (8, 2, 3), "palette": (8, 3, 1), "grey": (16, 0, 2)}[kind]
    packer, megabytes = zlib.compressobj(1), min((1 + width * size) * height, 300 << 20) >> 20
    packed = b"".join(packer.compress(bytes(1 << 20)) for _ in range(megabytes + 1)) + packer.flush()
    return png(width, height, depth, colour, packed, _chunk(b"PLTE", bytes(3)) * (kind == "palette"))


def long_jpeg(height: int, width: int, scans: int = 1) -> bytes:
    """Return a progressive JPEG that claims to be of that size and repeats its last pass over the pixels."""
    data = pictures()["progressive.jpg"]
    place, scan = data.index(b"\xff\xc2") + 5, data[data.rindex(b"\xff\xda") : -2]
    return data[:place] + struct.pack(">HH", height, width) + data[place + 4 : -2] + scan * (scans - 1) + b"\xff\xd9"


def _lying_jpeg(rng: Random) -> bytes:
    height, width = (rng.choice((0, 1, 24, 4000, 9000, 65535)) for _ in range(2))
    return maybe(rng, 0.2, long_jpeg(height, width, rng.choice((1, 1, 10, 1000, 20_000))))


# --- tables -----------------------------------------------------------------------------------------------------

_DTYPES = (
    "<f4", "<f8", "<f2", "|u1", "<i8", "<u8", "|b1", ">f4", "<c8", "|O", "<U3", "|S4", "<M8[s]", "|V8", "<U0", "|V0",
)  # fmt: skip
_SHAPES: tuple[tuple[int, ...], ...] = (
    (20, 3), (20,), (20, 8, 8), (20, 8, 8, 3), (20, 3, 8, 8), (0, 3), (20, 0), (), (1, 3),
)  # fmt: skip


def npy(kind: str, shape: tuple[int, ...], content: bytes = b"", order: bool = False, version: int = 1) -> bytes:
    """Return an .npy file whose header may lie about the content."""
    header = f"{{'descr': {kind!r}, 'fortran_order': {order}, 'shape': {shape}, }}".ljust(117) + "\n"
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header.encode() + content


def make_npz(rng: Random, folder: Path) -> None:
    """Write arrays of odd kinds, with headers that lie, in archives that are damaged."""
    names = rng.choice((["x", "y"], ["x_train", "y_train", "x_test", "y_test"], ["X", "Y", "classes"], ["x", "z"]))
    buffer, packing = io.BytesIO(), rng.choice((0, 8) * 12 + (12, 14))
    with zipfile.ZipFile(buffer, "w", packing) as archive:
        for name in names + [rng.choice(names)] * (rng.random() < 0.05):
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), _array(rng, name), packing)
    (folder / "a.npz").write_bytes(maybe(rng, 0.3, buffer.getvalue()))


def _array(rng: Random, name: str) -> bytes:
    """Return an array of this name; its values, or what its header says of them, may be odd."""
    values: NDArray[Any]
    if name == "classes":
        values = np.array(["cat", "dog", "cow"])
    elif name.lower().startswith("y"):
        values = (np.arange(20) % 3).astype(rng.choice(("<i8", "<i8", "|u1", "<U2", "<f4", "<u8", "|b1")))
    else:
        values = np.arange(60, dtype=np.float32).reshape(20, 3)
        values[7, 1] = rng.choice((1.0,) * 12 + (np.nan, np.inf, 3e38))
    shape, kind, content, lie = values.shape, values.dtype.str, values.tobytes(), rng.random()
    if lie < 0.06:
        shape = rng.choice((*_SHAPES, (10**12,), (2**62, 8), (-1, 3), (20, 10**9)))
    elif lie < 0.2:
        kind, shape = rng.choice(_DTYPES), rng.choice((shape, *_SHAPES))
        content = bytes(math.prod(shape) * np.dtype(kind).itemsize)
    data = npy(kind, shape, content, order=lie > 0.94, version=rng.choice((1,) * 60 + (2, 3, 9)))
    deep = rng.choice((b"",) * 200 + (b"{}", b"[" * 500, b"{'descr': " + b"(" * 2000, b"\0"))
    return maybe(rng, 0.04, data[:10] + deep + data[10:])


def npz_of_zeros(rows: int, columns: int) -> bytes:
    """Return an archive of at most 1 MB with features that take rows x columns bytes, or claim to."""
    buffer, labels = io.BytesIO(), np.arange(min(rows, 60_000)) % 2
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", npy("|u1", (rows, columns)) + bytes(min(rows * columns, 100_000_000)))
        archive.writestr(zipfile.ZipInfo("y.npy"), npy("<i8", labels.shape, labels.tobytes()))
    return buffer.getvalue()


def make_csv(rng: Random, folder: Path) -> None:
    """Write a table of numbers with a label."""
    label = rng.choice(("ab", "123", "é漢"))
    numbers = [(rng.uniform(-9, 9), rng.choice(("1", "1e5", "-0", " 3"))) for _ in range(12)]
    rows = [f"{x:.3f},{y},{label[k % len(label)]}" for k, (x, y) in enumerate(numbers)]
    text = "\n".join([rng.choice(("length,width,label",) * 8 + ("a,a,label", "a,b,c", '"a\nb",c,label')), *rows])
    (folder / "a.csv").write_bytes(damage_text(rng, text) if rng.random() < 0.9 else text.encode())


def make_parquet(rng: Random, folder: Path) -> None:
    """Write a table of numbers, of an odd column and of labels, by pyarrow, and damage it."""
    path, count = folder / "a.parquet", rng.choice((0, 1, 10, 10, 10, 300))
    odd = rng.choice((1.0, 1.0, 7, "x", True, None, [7], {"a": 7}, b"\xff", float("nan"), 10**18))
    label = rng.choice((("a", "b"), (0, 1), (0.0, 1.0), (b"x",), (None,), (2**63 - 1,), ("", "a" * 300), (math.inf,)))
    columns = [pa.array([float(k) for k in range(count)]), pa.array([odd] * count)]
    columns.append(pa.array([label[k % len(label)] for k in range(count)]))
    if rng.random() < 0.1:
        columns[2] = columns[2].dictionary_encode()
    names = rng.choice((("length", "odd", "label"),) * 6 + (("a", "a", "label"), ("a", "label", "b")))
    try:
        table = pa.Table.from_arrays(columns, names=list(names))
        pq.write_table(table, path, compression=rng.choice(("none", "snappy", "gzip", "zstd")))
    except pa.ArrowException:
        path.write_bytes(b"PAR1PAR1")  # pyarrow itself refuses
    path.write_bytes(maybe(rng, 0.6, path.read_bytes()))


def read_table(folder: Path) -> object:
    """Load the table as data to learn from, or as inputs to predict."""
    (path,) = folder.iterdir()
    if path.stat().st_size % 4:
        return load(path)
    return read_npz_rows(path) if path.suffix == ".npz" else read_rows(path)
