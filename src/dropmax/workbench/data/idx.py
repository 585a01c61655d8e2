"""The idx format of MNIST: ``00 00 08 d``, then d big-endian sizes, then that many bytes; plain or gzipped."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from dropmax.errors import DataError

__all__ = ["read_idx"]

_HOLDS = {1: "labels (1 dimension)", 3: "images (3 dimensions)"}
_DEFLATE_LIMIT = 1032  # no deflate stream expands by more, so a header promising more is lying
_MOST = 1 << 28  # bytes; MNIST's largest file has 47 million, and a small gzip of zeros could have any number
_BLOCK = 1 << 20


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes with the given number of dimensions (1 for labels, 3 for images).

    Whether it is gzipped is seen from its first bytes, not from its name. Nothing larger than what is really in the
    file is ever allocated, whatever the header claims.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "labels")
    >>> _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))
    >>> read_idx(path, 1)
    array([7, 2, 1], dtype=uint8)
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if packed:
                with gzip.GzipFile(fileobj=raw) as stream:
                    return _parse(stream, path, dimensions, size * _DEFLATE_LIMIT)  # type: ignore[arg-type]
            return _parse(raw, path, dimensions, size)
    except EOFError:
        raise DataError(f"{path} is cut short: the gzip stream ends early; fetch it again") from None
    except (OSError, zlib.error) as error:
        raise DataError(f"{path} cannot be read as an idx file: {error}") from error


def _parse(stream: BinaryIO, path: Path, dimensions: int, most: int) -> NDArray[np.uint8]:
    header = stream.read(4 + 4 * dimensions)
    if len(header) < 4:
        raise DataError(f"{path} is {'too short' if header else 'empty'}: an idx file of MNIST was expected")
    if header[:3] != b"\x00\x00\x08":
        raise DataError(f"{path} is not an idx file of bytes: it starts with {header[:4].hex(' ')}, not 00 00 08")
    if header[3] != dimensions:
        found = _HOLDS.get(header[3], f"{header[3]} dimensions")
        raise DataError(f"{path} holds {found} where {_HOLDS.get(dimensions, dimensions)} were expected")
    sizes = tuple(int(size) for size in np.frombuffer(header, ">u4", offset=4, count=(len(header) - 4) // 4))
    total = math.prod(sizes)
    if len(sizes) < dimensions or total > most:
        raise DataError(f"{path} is cut short: its header promises more bytes than the file can hold")
    if total > _MOST:
        raise DataError(f"{path} promises {total:,} bytes, but no file of MNIST has more than {_MOST:,}")
    if total == 0:
        raise DataError(f"{path} holds nothing: its header gives the sizes {sizes}")
    content = bytearray()
    while len(content) <= total:  # up to one byte too many, to notice a file longer than it says
        block = stream.read(min(_BLOCK, total + 1 - len(content)))
        if not block:
            break
        content += block
    if len(content) != total:
        compared = "more" if len(content) > total else "fewer"
        raise DataError(f"{path} holds {compared} bytes than the {total:,} its header promises ({sizes})")
    return np.frombuffer(content, np.uint8).reshape(sizes)
