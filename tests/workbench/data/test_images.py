from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dropmax.errors import DataError
from dropmax.workbench.data import images
from dropmax.workbench.data.images import decode, decoded
from tests.workbench.data.layouts import picture


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths handed to decode, as they come."""
    seen: list[Path] = []

    def counting(path: Path, size: int) -> np.ndarray:
        seen.append(path)
        return decode(path, size)

    monkeypatch.setattr(images, "decode", counting)
    return seen


# Sizes whose centre square falls on whole pixels, before and after scaling.
@pytest.mark.parametrize("size", [(80, 40), (40, 80), (16, 16), (8, 12)])
def test_short_side_then_centre_square(tmp_path: Path, size: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    blurred = Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    blurred.save(tmp_path / "a.png")
    scale = 16 / min(size)
    whole = blurred.resize((round(size[0] * scale), round(size[1] * scale)), Image.Resampling.BICUBIC)
    left, top = (whole.width - 16) // 2, (whole.height - 16) // 2
    expected = np.asarray(whole.crop((left, top, left + 16, top + 16))).transpose(2, 0, 1).astype(int)
    # Cropping first hides from the filter what lies beyond the two cut edges; all else is the same.
    difference = np.abs(decode(tmp_path / "a.png", 16) - expected)
    assert difference[:, 2:-2, 2:-2].max() <= 2
    assert difference.mean() < 3


def test_an_image_of_the_right_size_is_not_touched(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 21, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert np.array_equal(decode(tmp_path / "a.png", 16), pixels[:, 2:18].transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("L", 77, (77, 77, 77)),
        ("RGBA", (10, 200, 30, 128), (10, 200, 30)),
        ("P", 3, (9, 8, 7)),
        ("1", 1, (255, 255, 255)),
        ("LA", (50, 10), (50, 50, 50)),
        ("I;16", 40_000, (156, 156, 156)),
        ("CMYK", (0, 0, 0, 0), (255, 255, 255)),
    ],
)
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str, colour: Any, expected: tuple[int, ...]) -> None:
    image = Image.new(mode, (12, 12), colour)
    if mode == "P":
        image.putpalette([0, 0, 0, 1, 1, 1, 2, 2, 2, 9, 8, 7])
    image.save(tmp_path / "a", "JPEG" if mode == "CMYK" else "PNG")
    assert tuple(decode(tmp_path / "a", 8)[:, 4, 4]) == expected


def test_exif_orientation_is_honoured(tmp_path: Path) -> None:
    image = Image.new("RGB", (20, 20), "black")
    image.paste("white", (0, 0, 20, 10))  # the upper half
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise: the upper half becomes the right one
    image.save(tmp_path / "a.jpg", exif=exif, quality=95)
    grey = decode(tmp_path / "a.jpg", 20).mean(0)
    assert grey[:, 13:].min() > 200
    assert grey[:, :7].max() < 50


def bomb(path: Path) -> None:
    """A PNG whose header claims 60,000 x 60,000 pixels."""
    content = bytearray(picture(path).read_bytes())
    content[16:24] = (60_000).to_bytes(4, "big") * 2
    content[29:33] = zlib.crc32(bytes(content[12:29])).to_bytes(4, "big")
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.write_text("<html>"), "is not an image that can be read"),
        (lambda path: path.write_bytes(b""), "is not an image that can be read"),
        (lambda path: path.write_bytes(picture(path).read_bytes()[:-30]), "is not an image that can be read"),
        (bomb, "too many pixels"),
        (
            lambda path: Image.new("1", (10_000, 9_000)).save(path),
            "has 10,000 x 9,000 pixels, over the limit of 89,478,485",
        ),
        (lambda path: path.mkdir(), "is not an image that can be read"),
        (lambda path: None, "is missing"),
        (lambda path: Image.new("F", (9, 9)).save(path, "TIFF"), "floating-point pixels"),
        (lambda path: path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "is not an image"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_what_is_no_image_is_named(tmp_path: Path, make: Callable[[Path], object], says: str) -> None:
    path = tmp_path / "culprit.png"
    make(path)
    with pytest.raises(DataError, match=says) as caught:
        decode(path, 8)
    assert str(path) in str(caught.value)


def test_the_second_run_decodes_nothing(tmp_path: Path, counted: list[Path]) -> None:
    files = [picture(tmp_path / "set" / f"{n}.png", (n, 0, 0)) for n in range(130)]
    first = decoded(files, tmp_path / "set", 8)
    assert first[:, 0, 4, 4].tolist() == list(range(130))
    assert len(counted) == 130
    second = decoded(files, tmp_path / "set", 8)
    assert np.array_equal(first, second)
    assert len(counted) == 130
    assert decoded(files, tmp_path / "set", 12).shape[-1] == 12  # another size is another cache
    assert len(counted) == 260
    second[0] = 99  # copy on write: the file must not change
    assert decoded(files, tmp_path / "set", 8)[0, 0, 0, 0] == 0
    assert len(counted) == 260  # and neither has pushed out the other


def test_the_cache_follows_the_content(tmp_path: Path, counted: list[Path]) -> None:
    root = tmp_path / "set"
    files = [picture(root / "a.png", (1, 1, 1)), picture(root / "b.png", (2, 2, 2))]
    decoded(files, root, 8)
    os.utime(files[0], ns=(1, 1))  # another time, the same bytes: hashed again, not decoded again
    decoded(files, root, 8)
    assert len(counted) == 2
    os.rename(root, tmp_path / "moved")
    moved = [tmp_path / "moved" / path.name for path in files]
    decoded(moved, tmp_path / "moved", 8)
    assert len(counted) == 2
    picture(moved[1], (7, 7, 7))
    assert decoded(moved, tmp_path / "moved", 8)[:, 0, 0, 0].tolist() == [1, 7]
    assert decoded(moved[::-1], tmp_path / "moved", 8)[:, 0, 0, 0].tolist() == [7, 1]  # the order counts


def test_a_broken_cache_is_made_again_and_a_failed_one_leaves_nothing(tmp_path: Path, counted: list[Path]) -> None:
    files = [picture(tmp_path / "set" / "a.png")]
    decoded(files, tmp_path / "set", 8)
    (cache,) = (tmp_path / "cache" / "images").glob("*.npy")
    cache.write_bytes(cache.read_bytes()[:100])
    assert decoded(files, tmp_path / "set", 8).shape == (1, 3, 8, 8)
    assert len(counted) == 2
    files.append(tmp_path / "set" / "culprit.png")
    files[1].write_text("no image")
    before = sorted((tmp_path / "cache" / "images").glob("*.npy"))
    with pytest.raises(DataError, match=r"culprit.png is not an image"):
        decoded(files, tmp_path / "set", 8)
    assert sorted((tmp_path / "cache" / "images").glob("*.npy")) == before
    assert not list((tmp_path / "cache" / "images").glob("*.tmp"))


def test_an_unusable_cache_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [picture(tmp_path / "set" / "a.png")]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DROPMAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot be used .*DROPMAX_CACHE"):
        decoded(files, tmp_path / "set", 8)
    monkeypatch.setenv("DROPMAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(images.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(DataError, match=r"needs 0 MB .*where 0 MB are free"):
        decoded(files, tmp_path / "set", 8)
