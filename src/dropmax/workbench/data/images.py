"""Image files: decoded once to uint8 squares, and kept in a memory-mapped cache that later runs open at once."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from dropmax.errors import DataError, InvalidValue
from dropmax.workbench.data.catalogue import cache_folder
from dropmax.workbench.data.labels import digest
from dropmax.workbench.files import filling, write_atomically
from dropmax.workbench.terminal import progress

_Result = TypeVar("_Result")

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
DEFAULT_IMAGE_SIZE = 64
DECODER = 1  # raise it whenever decode() changes what it returns, so that old caches are not used
MOST_PIXELS = 89_478_485  # Pillow's own limit, where it would only warn; a quarter of a gigabyte of RGB
# Named formats only: Pillow would otherwise try dozens, some of which start other programs.
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_LARGE = threading.Lock()  # the largest images take a gigabyte, and there may be one thread per core
_MANY_PIXELS = 1 << 24
_CHUNK = 64  # files per task: with one file per task, queues would cost more than small images


def stored_size(image_size: int) -> int:
    """Return the side images are stored at for a network that sees ``image_size``: 72/64 of it, to crop from."""
    if not 8 <= image_size <= 2048:
        raise InvalidValue(f"image_size must be 8 to 2048 pixels, not {image_size}")
    return round(image_size * 72 / 64)


def decode(path: Path, size: int) -> NDArray[np.uint8]:
    """Decode one image to RGB (3, size, size): short side scaled to ``size``, then the centre square.

    Turned upright by its EXIF orientation; grey, palette and CMYK images become RGB, transparency is dropped, 16-bit
    grey is cut to 8 bits, and of an animation the first frame is taken.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "red.png")
    >>> Image.new("RGB", (40, 20), "red").save(path)
    >>> decode(path, 8)[:, 4, 4]
    array([255,   0,   0], dtype=uint8)
    """
    with open_image(path) as opened:
        return square(opened, size)


@contextlib.contextmanager
def open_image(path: Path) -> Iterator[Image.Image]:
    """Open an image whose pixels are safe to decode; whatever goes wrong with it inside becomes a DataError."""
    try:
        with open_header(path) as opened:
            pixels = opened.width * opened.height
            if opened.format in ("JPEG", "MPO") and has_too_many_passes(path.read_bytes(), pixels):
                raise DataError(f"{path} asks for more passes over its pixels than any sound JPEG does")
            with _LARGE if pixels > _MANY_PIXELS else contextlib.nullcontext():
                yield opened
    except DataError:
        raise
    except Exception as error:  # Pillow raises almost anything on a damaged file, and all of it means the same
        raise DataError(f"{path} is not an image that can be read: {error}") from error


def square(opened: Image.Image, size: int) -> NDArray[np.uint8]:
    """Return an opened image as uint8 (3, size, size), upright and in RGB, scaled and cut to its centre square."""
    opened.draft(None, (3 * size, 3 * size))  # JPEG only: skips detail far below what is kept
    ImageOps.exif_transpose(opened, in_place=True)
    image = to_rgb(opened)
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    cut = image.resize((size, size), Image.Resampling.BICUBIC, (left, top, left + side, top + side), 3.0)
    return np.ascontiguousarray(np.asarray(cut).transpose(2, 0, 1))


def as_input(pixels: NDArray[np.uint8], input_shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return a decoded square (3, size, size) as the input (C, H, W) of a network: grey for C = 1, and cropped."""
    channels, height, width = input_shape
    if channels == 1:
        luma = np.array([0.299, 0.587, 0.114], np.float32).reshape(3, 1, 1)
        pixels = np.rint((pixels * luma).sum(0, keepdims=True)).astype(np.uint8)
    cropped: NDArray[np.uint8] = centre_crop(pixels, height, width)
    return cropped


def centre_crop(images: Any, height: int, width: int) -> Any:
    """Return the middle (..., height, width) of arrays or tensors (..., H, W)."""
    top, left = (images.shape[-2] - height) // 2, (images.shape[-1] - width) // 2
    return images[..., top : top + height, left : left + width]


def short_sides(files: Sequence[Path], most: int = 64) -> list[int]:
    """Return the shorter sides of up to ``most`` of the images, evenly chosen, by their headers."""
    sides = []
    for path in files[:: max(1, -(-len(files) // most))]:
        with open_header(path) as image:
            sides.append(min(image.size))
    return sides


def open_header(path: Path) -> Image.Image:
    """Open an image, reading no more than its header, and refuse what is not an image or has too many pixels."""
    try:
        image = Image.open(path, formats=_FORMATS)
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{path} has too many pixels to be decoded safely: {error}") from error
    except Exception as error:
        why = f"its content is none of {', '.join(_FORMATS)}" if isinstance(error, UnidentifiedImageError) else error
        raise DataError(f"{path} is not an image that can be read: {why}") from error
    if image.width * image.height > MOST_PIXELS:
        image.close()
        raise DataError(f"{path} has {image.width:,} x {image.height:,} pixels, over the limit of {MOST_PIXELS:,}")
    return image


def has_too_many_passes(content: bytes, pixels: int) -> bool:
    """Say whether decoding a JPEG would go over its pixels far too often.

    A progressive JPEG refines its picture some ten times, each time with a scan (marker FF DA) of its own. A file of
    some kilobytes can ask for thousands of empty ones, which take minutes. No sound data holds FF DA but as a marker.
    """
    return content.count(b"\xff\xda") * pixels > 16 * MOST_PIXELS


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image as RGB without transparency; 16-bit grey is cut to 8 bits."""
    if image.mode.startswith("I"):  # 16-bit grey; Pillow's own conversion would clip it at 255 instead of scaling
        grey = np.empty((image.height, image.width), np.uint8)
        for top in range(0, image.height, 256):  # strip by strip: the whole would be held thrice
            strip = np.asarray(image.crop((0, top, image.width, min(top + 256, image.height))))
            grey[top : top + 256] = (strip >> 8).clip(0, 255)
        return Image.fromarray(grey).convert("RGB")
    if image.mode == "F":
        raise ValueError("floating-point pixels are not supported")
    if image.mode == "P":
        image = image.convert("RGBA")
    return image.convert("RGB")


def decoded(files: Sequence[Path], root: Path, size: int) -> NDArray[np.uint8]:
    """Return the images of ``files`` as one memory-mapped array (N, 3, size, size), decoding them where not cached.

    The cache file is named by a SHA-256 over the names (relative to ``root``) and bytes of all files, the size and
    the versions of this decoder and of Pillow.
    """
    key = hashlib.sha256(f"{content_key(files, root)} {size} {DECODER} {PIL.__version__}".encode()).hexdigest()
    shape = (len(files), 3, size, size)
    with cache_folder("images") as folder:
        cache = folder / f"{key[:40]}.npy"
        array = _open(cache, shape)
        if array is None:
            _decode_into(cache, files, shape)
            array = _open(cache, shape)
    if array is None:
        raise DataError(f"the image cache {cache} changed while it was being opened: try again")
    return array


def _open(cache: Path, shape: tuple[int, ...]) -> NDArray[np.uint8] | None:
    """Map a cache file, or return None where there is none or it is not what it should be."""
    try:
        # "c" is copy-on-write: torch wants writable memory, and the file stays as it is.
        array = np.lib.format.open_memmap(cache, mode="c")
    except (FileNotFoundError, ValueError, EOFError):
        return None
    return np.asarray(array) if array.shape == shape and array.dtype == np.uint8 else None


def _decode_into(cache: Path, files: Sequence[Path], shape: tuple[int, ...]) -> None:
    needed = int(np.prod(shape))
    free = shutil.disk_usage(cache.parent).free
    if needed > free:  # writing past a full disc through a memory map would kill the process, not raise
        raise DataError(
            f"the image cache needs {needed / 1e6:,.0f} MB in {cache.parent}, where {free / 1e6:,.0f} MB are free: "
            "choose another directory with DROPMAX_CACHE, or a smaller image_size"
        )
    with filling(cache) as place:
        array = np.lib.format.open_memmap(place, "w+", np.uint8, shape)

        def work(start: int) -> None:
            for row, path in enumerate(files[start : start + _CHUNK], start):
                array[row] = decode(path, shape[-1])

        for _ in _in_chunks(work, len(files), "decoding"):
            pass
        array.flush()


def _in_chunks(work: Callable[[int], _Result], count: int, verb: str) -> Iterator[_Result]:
    """Yield ``work(start)`` for each chunk of so many images, in threads: Pillow works outside Python's lock."""
    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        with progress(f"{verb} {count:,} images, once", count, "images") as advance:
            starts = range(0, count, _CHUNK)
            for start, result in zip(starts, pool.map(work, starts), strict=True):
                yield result
                advance(min(_CHUNK, count - start))
    finally:
        pool.shutdown(cancel_futures=True)


def content_key(files: Sequence[Path], root: Path) -> str:
    """Return a SHA-256 over the names and bytes of all files, remembered under their names, sizes and times."""
    prefix = root.as_posix()
    names = [path.as_posix().removeprefix(prefix) for path in files]
    seen = hashlib.sha256(os.fsencode(os.path.abspath(root)))
    for path, name in zip(files, names, strict=True):
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(f"{path} is listed but cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device could be read for ever
            raise DataError(f"{path} is not a file: remove it, or put an image in its place")
        seen.update(os.fsencode(f"\0{name}\0{status.st_size}\0{status.st_mtime_ns}"))
    with cache_folder("images") as folder:
        note = folder / f"{seen.hexdigest()[:40]}.key"
        if note.is_file() and len(key := note.read_text(encoding="ascii", errors="replace")) == 64:
            return key
        content = hashlib.sha256()

        def work(start: int) -> list[str]:
            return [digest(path, "sha256") for path in files[start : start + _CHUNK]]

        found = itertools.chain.from_iterable(_in_chunks(work, len(files), "reading"))
        for name, of_file in zip(names, found, strict=True):
            content.update(os.fsencode(f"\0{name}\0{of_file}"))
        write_atomically(note, content.hexdigest())
    return content.hexdigest()
