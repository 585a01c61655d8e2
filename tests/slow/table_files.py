"""Malformed tables, .npz, .csv and .parquet: how to make them, and the call that reads them."""

from __future__ import annotations

import functools
import io
import struct
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dropmax.workbench.data import load
from dropmax.workbench.data.tables import read_features
from tests.slow.damage import damage_bytes, damage_text

_DTYPES = (
    "<f4",
    "<f8",
    "<f2",
    "|u1",
    "<i8",
    "<u8",
    "|b1",
    ">f4",
    "<c8",
    "|O",
    "<U3",
    "|S4",
    "<M8[s]",
    "|V8",
    "<U0",
    "|V0",
)
_SHAPES: tuple[tuple[int, ...], ...] = (
    (20, 3),
    (20,),
    (20, 8, 8),
    (20, 8, 8, 3),
    (20, 3, 8, 8),
    (0, 3),
    (20, 0),
    (),
    (1, 3),
)


def make_npz(rng: Random, folder: Path) -> None:
    """Write arrays of odd kinds, with headers that lie, in archives that are damaged."""
    if rng.random() < 0.004:
        (folder / "a.npz").write_bytes(npz_of_zeros(*rng.choice(((16_000, 1000), (60_000, 8000), (10**9, 1000)))))
        return
    names = [["x", "y"], ["x_train", "y_train", "x_test", "y_test"], ["X", "Y", "classes"], ["x", "z"]][
        rng.randrange(4)
    ]
    buffer = io.BytesIO()
    packing = rng.choice((0, 8) * 12 + (12, 14))
    with zipfile.ZipFile(buffer, "w", packing) as archive:
        for name in names + [rng.choice(names)] * (rng.random() < 0.05):
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), _npy(rng, name), packing)
    data = buffer.getvalue()
    (folder / "a.npz").write_bytes(damage_bytes(rng, data) if rng.random() < 0.3 else data)


def _npy(rng: Random, name: str) -> bytes:
    if name == "classes":
        values: NDArray[Any] = np.array(["cat", "dog", "cow"][: rng.choice((0, 2, 3, 3))], dtype="U3")
    elif name.lower().startswith("y"):
        values = np.arange(20) % rng.choice((1, 2, 3, 3, 3, 3, 20))
        values = values.astype(rng.choice(("<i8", "<i8", "|u1", "<U2", "<f4", "<u8", "|b1")))
        if rng.random() < 0.2 and values.dtype.kind in "fu":
            values[rng.randrange(20)] = (
                rng.choice((255, 0, 7)) if values.dtype.kind == "u" else rng.choice((1e30, np.nan))
            )
    else:
        values = np.arange(60, dtype=np.float32).reshape(20, 3)
        if rng.random() < 0.2:
            values[rng.randrange(20), 1] = rng.choice((np.nan, np.inf, 3e38))
        if rng.random() < 0.3:
            values = np.zeros((20, 8, 8), np.uint8)
    shape, kind, order = values.shape, values.dtype.str, False
    lie = rng.random()
    if lie < 0.06:
        shape = rng.choice((*_SHAPES, (10**12,), (2**62, 8), (-1, 3), (20, 10**9)))
    elif lie < 0.14:
        kind = rng.choice(_DTYPES)
        shape = rng.choice((shape, *_SHAPES))
        size = int(np.prod([min(abs(n), 100) for n in shape])) * np.dtype(kind).itemsize
        values = np.zeros(size, np.uint8) if rng.random() < 0.8 else values
    elif lie < 0.2:
        order = True
    header = f"{{'descr': {kind!r}, 'fortran_order': {order}, 'shape': {shape}, }}"
    if rng.random() < 0.02:
        header = rng.choice(
            ("{}", "[" * 500, header.replace("descr", "x"), "{'descr': " + "(" * 2000, header * 300, "\0")
        )
    if rng.random() < 0.98:
        header = header.ljust(117) + "\n"
    version = rng.choice(((1, 0),) * 60 + ((2, 0), (3, 0), (9, 9)))
    length = struct.pack("<H" if version[0] == 1 else "<I", len(header) % 65536)
    data = b"\x93NUMPY" + bytes(version) + length + header.encode() + values.tobytes()
    return damage_bytes(rng, data) if rng.random() < 0.04 else data


@functools.cache
def npz_of_zeros(rows: int, columns: int) -> bytes:
    """Return an archive of at most 1 MB with features that take rows x columns bytes, or claim to."""
    buffer = io.BytesIO()
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({rows}, {columns}), }}".ljust(117) + "\n"
    start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
    packed = zipfile.ZipInfo("x.npy")
    packed.compress_type = zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open(packed, "w", force_zip64=True) as stream:
            stream.write(start)
            left = min(rows * columns, 100_000_000)
            while left:
                left -= stream.write(bytes(min(left, 1 << 20)))
        labels = io.BytesIO()
        np.save(labels, np.arange(min(rows, 60_000)) % 2)
        archive.writestr(zipfile.ZipInfo("y.npy"), labels.getvalue())
    return buffer.getvalue()


def make_csv(rng: Random, folder: Path) -> None:
    """Write a table of numbers with a label."""
    if rng.random() < 0.003:  # one long cell, which must not decide what the others take
        rows = [f"{k},{k % 2}.5,{'ab'[k % 2]}" for k in range(20_000)]
        long = "1" * 100_000
        rows[rng.randrange(20_000)] = rng.choice((f"{long},1,a", f"1,2,{long}", f"0.{long},1,b"))
        (folder / "a.csv").write_text("\n".join(["x,y,label", *rows]))
        return
    label = rng.choice(("ab", "123", "é漢"))
    rows = [
        f"{rng.uniform(-9, 9):.3f},{rng.choice(('1', '1e5', '-0', ' 3'))},{label[k % len(label)]}" for k in range(12)
    ]
    text = "\n".join([rng.choice(("length,width,label",) * 8 + ("a,a,label", "a,b,c", '"a\nb",c,label')), *rows])
    (folder / "a.csv").write_bytes(damage_text(rng, text) if rng.random() < 0.9 else text.encode())


def make_parquet(rng: Random, folder: Path) -> None:
    """Write a table of numbers with a label, by pyarrow, and damage it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "a.parquet"
    count = rng.choice((0, 1, 10, 10, 10, 300))
    if rng.random() < 0.005:
        count = rng.choice((200_000, 5_000_000))
        name = "n" * rng.choice((1, 200_000))
        table = pa.table({"length": pa.array(np.zeros(count)), "label": pa.DictionaryArray.from_arrays(
            pa.array(np.zeros(count, np.int32)), pa.array([name, "b"]))})  # fmt: skip
    else:
        numbers = [float(k) for k in range(count)]
        odd: Any = rng.choice((
            numbers, numbers, numbers, [int(k) for k in numbers], [k > 3 for k in numbers], [str(k) for k in numbers],
            [None, *numbers[1:]] if count else [], [[k] for k in numbers], [{"a": k} for k in numbers],
            [b"\xff" for _ in numbers], [float("nan") for _ in numbers], [10**18 for _ in numbers],
        ))  # fmt: skip
        labels: Any = rng.choice((
            ["ab"[k % 2] for k in range(count)], [k % 3 for k in range(count)], [float(k % 2) for k in range(count)],
            [b"x" for _ in range(count)], [None for _ in range(count)], [2**63 - 1 for _ in range(count)],
            ["a" * (300 * (k % 2)) for k in range(count)], [float("inf") for _ in range(count)],
        ))  # fmt: skip
        names = rng.choice((("length", "odd", "label"),) * 6 + (("a", "a", "label"), ("a", "label", "b")))
        if rng.random() < 0.1 and all(isinstance(k, (str, int)) for k in labels):
            labels = pa.array(labels).dictionary_encode()
        table = pa.Table.from_arrays([pa.array(numbers), pa.array(odd), pa.array(labels)], names=list(names))
    try:
        pq.write_table(table, path, compression=rng.choice(("none", "snappy", "gzip", "zstd")), row_group_size=100_000)
    except pa.ArrowException:
        path.write_bytes(b"PAR1PAR1")  # pyarrow itself refuses
    if rng.random() < 0.6:
        path.write_bytes(damage_bytes(rng, path.read_bytes()))


def read_table(folder: Path) -> object:
    """Load the table as data to learn from, or as inputs to predict."""
    (path,) = folder.iterdir()
    if path.stat().st_size % 4 == 0:
        return read_features(path)
    return load(path)
