"""Malformed pictures: how to make them, and the call that reads them."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from pathlib import Path
from random import Random

import numpy as np

from dropmax.workbench.data import load
from dropmax.workbench.data.images import decode
from tests.slow.damage import INTEGERS, damage_bytes, deflated


@functools.cache
def pictures() -> dict[str, bytes]:
    """Return small sound pictures of every format that is read, by name."""
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (18, 24, 3))
    colour = Image.fromarray(noise.astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    found = {}
    for name, image, options in (
        ("colour.png", colour, {}),
        ("palette.png", colour.convert("P"), {}),
        ("clear.png", colour.convert("LA"), {}),
        ("deep.png", colour.convert("I;16"), {}),
        ("bits.png", colour.convert("1"), {}),
        ("colour.jpg", colour, {"exif": exif}),
        ("progressive.jpg", colour, {"progressive": True}),
        ("print.jpg", colour.convert("CMYK"), {}),
        ("colour.gif", colour.convert("P"), {"save_all": True, "append_images": [colour.convert("P")]}),
        ("colour.bmp", colour, {}),
        ("colour.webp", colour, {}),
        ("plain.tif", colour, {}),
        ("packed.tif", colour, {"compression": "tiff_lzw"}),
        ("deflated.tif", colour, {"compression": "tiff_adobe_deflate"}),
        ("colour.ppm", colour, {}),
        ("grey.pgm", colour.convert("L"), {}),
    ):
        buffer = io.BytesIO()
        kind = {"jpg": "JPEG", "tif": "TIFF", "ppm": "PPM", "pgm": "PPM"}.get(
            name[-3:], name.rpartition(".")[2].upper()
        )
        image.save(buffer, kind, **options)
        found[name] = buffer.getvalue()
    return found


def make_image(rng: Random, folder: Path) -> None:
    """Write one picture, whose header, chunks or bytes lie; or a folder of them with one of that kind."""
    name = rng.choice(list(pictures()))
    data = pictures()[name]
    kind = rng.random()
    if kind < 0.002:
        side = rng.choice((9400, 40_000))
        data, name = png_of_zeros(side, side, rng.choice(("colour", "palette", "grey"))), "bomb.png"
    elif kind < 0.15:
        data, name = _lying_png(rng), "lying.png"
    elif kind < 0.25:
        data, name = _lying_jpeg(rng), "lying.jpg"
    elif kind < 0.95:
        data = damage_bytes(rng, data)
    if rng.random() < 0.2:
        name = name.rpartition(".")[0] + rng.choice((".jpg", ".png", ".gif", ".tiff", ".JPEG"))
    if rng.random() < 0.06:
        for label in ("cat", "dog"):
            (folder / "set" / label).mkdir(parents=True)
            for k in range(3):
                (folder / "set" / label / f"{k}.png").write_bytes(pictures()["colour.png"])
        (folder / "set" / "dog" / name).write_bytes(data)
    else:
        (folder / name).write_bytes(data)


def read_image(folder: Path) -> object:
    """Decode the picture, or load the folder."""
    if (folder / "set").exists():
        return load(folder / "set", image_size=8)
    (path,) = (path for path in folder.iterdir() if path.is_file())
    return decode(path, 16)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _png(width: int, height: int, depth: int, colour: int, packed: bytes, more: bytes = b"") -> bytes:
    """Return a PNG whose checksums are right, however wrong its contents are."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    end = _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + more + end


def _lying_png(rng: Random) -> bytes:
    width, height = (rng.choice((0, 1, 8, 24, 5000, 9000, 65535, 2**31 - 1, 2**32 - 1)) for _ in range(2))
    depth, colour = rng.choice((1, 2, 4, 8, 16, 3, 0)), rng.choice((0, 2, 3, 4, 6, 1, 7))
    more = rng.choice((
        b"",
        _chunk(b"PLTE", rng.randbytes(rng.choice((0, 3, 7, 768, 3000)))),
        _chunk(b"zTXt", b"words\x00\x00" + zlib.compress(bytes(1 << 20)) * rng.choice((1, 100))),
        _chunk(b"iCCP", b"profile\x00\x00" + zlib.compress(bytes(10 << 20), 1)),
        _chunk(b"tRNS", rng.randbytes(rng.choice((0, 1, 6, 300)))),
        _chunk(b"acTL", struct.pack(">II", rng.choice(INTEGERS) % 2**32, 0)),
        _chunk(b"eXIf", b"II*\x00" + rng.randbytes(40)),
    ))  # fmt: skip
    return _png(width, height, depth, colour, zlib.compress(bytes(rng.choice((0, 100, 100_000)))), more)


@functools.cache
def png_of_zeros(width: int, height: int, kind: str = "colour") -> bytes:
    """Return a small PNG of very many pixels: of colours, of a palette, or of 16-bit grey."""
    depth, colour, size = {"colour": (8, 2, 3), "palette": (8, 3, 1), "grey": (16, 0, 2)}[kind]
    packed, _, adler = deflated(b"", min((1 + width * size) * height, 300 << 20))
    more = _chunk(b"PLTE", bytes(3)) if kind == "palette" else b""
    return _png(width, height, depth, colour, b"\x78\xda" + packed + struct.pack(">I", adler), more)


def _lying_jpeg(rng: Random) -> bytes:
    """Change the size in the frame header, and repeat the scans of a progressive picture."""
    data = pictures()[rng.choice(("colour.jpg", "progressive.jpg", "print.jpg"))]
    marker = b"\xff\xc2" if b"\xff\xc2" in data else b"\xff\xc0"
    place = data.index(marker) + 5
    size = rng.choice((0, 1, 24, 4000, 9000, 65535)), rng.choice((0, 1, 24, 4000, 9000, 65535))
    data = data[:place] + struct.pack(">HH", *size) + data[place + 4 :]
    if marker == b"\xff\xc2" and rng.random() < 0.5:
        scan = data[data.rindex(b"\xff\xda") : -2]
        data = data[:-2] + scan * rng.choice((10, 1000, 20_000)) + b"\xff\xd9"
    return damage_bytes(rng, data) if rng.random() < 0.2 else data
