"""Images from strangers: the same pixels as training decodes, and nothing but a polite refusal for the rest."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dropmax.errors import DataError
from dropmax.lab import images
from dropmax.workbench.data import load
from dropmax.workbench.data.unlabelled import Expected, read_inputs


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def photograph(size: tuple[int, int] = (90, 60)) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1] // 6, size[0] // 6, 3), np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)


def png_claiming(width: int, height: int) -> bytes:
    """A PNG whose header promises this many pixels, and whose data is tiny."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(("shape", "stored"), [((3, 64, 64), 72), ((3, 32, 32), 32), ((1, 28, 28), 28)])
@pytest.mark.parametrize("form", images.FORMATS)
@pytest.mark.parametrize("mode", ["RGB", "L", "P"])
def test_an_upload_is_prepared_as_predict_prepares_a_file(
    tmp_path: Path, shape: tuple[int, ...], stored: int, form: str, mode: str
) -> None:
    content = encoded(photograph().convert(mode).convert("RGB" if form in ("JPEG", "WEBP") else mode), form)
    path = tmp_path / f"photograph.{form.lower()}"
    path.write_bytes(content)
    ((_, expected),) = read_inputs([path], Expected(shape, stored))
    assert torch.equal(images.as_trained(images.open_upload(content), shape, stored), expected[0])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"\x80\x04\x95cos\nsystem\n",
        encoded(Image.new("RGB", (9, 9)), "TIFF"),
        encoded(Image.new("RGB", (9, 9)), "PPM"),
        encoded(Image.new("RGB", (9, 9)), "ICO"),
    ],
    ids=["empty", "text", "svg", "eps", "pickle", "tiff", "ppm", "ico"],
)
def test_other_files_are_refused(content: bytes) -> None:
    with pytest.raises(DataError, match="not an image that can be read; PNG, JPEG, WEBP, GIF and BMP can"):
        images.open_upload(content)


@pytest.mark.parametrize(("width", "height"), [(5000, 5000), (9500, 9500), (60_000, 60_000), (2**31 - 1, 2**31 - 1)])
def test_an_image_of_too_many_pixels_is_refused_by_its_header(width: int, height: int) -> None:
    with pytest.raises(DataError, match="pixels"):
        images.open_upload(png_claiming(width, height))


@pytest.mark.parametrize("prepare", [images.as_digit, lambda image: images.as_trained(image, (3, 32, 32), 32)])
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP"])
def test_a_truncated_image_is_refused(form: str, prepare: object) -> None:
    content = encoded(photograph((300, 300)), form)
    with pytest.raises(DataError, match=r"damaged|can be read"):
        prepare(images.open_upload(content[: len(content) // 2]))  # type: ignore[operator]


def test_a_picture_much_longer_than_wide_needs_little_memory() -> None:
    thin = encoded(Image.new("L", (6_000_000, 1)), "PNG")
    assert len(thin) < images.MOST_BYTES
    assert images.as_trained(images.open_upload(thin), (3, 32, 32), 32).shape == (3, 32, 32)
    with pytest.raises(DataError, match="one even shade"):
        images.as_digit(images.open_upload(thin))


@given(st.binary(max_size=200), st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "WEBP"]), st.data())
def test_damaged_bytes_end_in_an_image_or_our_own_error(noise: bytes, form: str, data: st.DataObject) -> None:
    content = bytearray(encoded(photograph((24, 18)), form))
    place = data.draw(st.integers(0, len(content)))
    content[place : place + len(noise)] = noise
    for prepare in (images.as_digit, lambda image: images.as_trained(image, (1, 28, 28), 28)):
        try:
            found = prepare(images.open_upload(bytes(content)))
        except DataError:
            continue
        assert found.dtype == torch.uint8
        assert found.shape == (1, 28, 28)


def as_picture(digit: np.ndarray, ink: int, paper: int) -> Image.Image:
    large = np.kron(np.pad(digit, 6), np.ones((8, 8)))
    return Image.fromarray((paper + (ink - paper) * large / 255).astype(np.uint8))


def test_a_digit_on_light_or_dark_or_clear_paper_is_the_same_digit() -> None:
    digit = load("mnist-1k").test.inputs[0, 0].numpy()
    white_on_black = images.as_digit(as_picture(digit, 255, 0))
    black_on_white = images.as_digit(as_picture(digit, 0, 255))
    pencil = images.as_digit(as_picture(digit, 90, 200))
    alpha = as_picture(digit, 255, 0)
    clear = Image.merge("LA", (Image.new("L", alpha.size, 0), alpha))
    assert (white_on_black.int() - torch.from_numpy(digit).int()).abs().float().mean() < 4  # a rim is cut off
    for other in (black_on_white, pencil, images.as_digit(images.open_upload(encoded(clear)))):
        assert (other.int() - white_on_black.int()).abs().max() <= 8


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_a_png_holds_the_pixels_it_was_made_of(channels: int) -> None:
    pixels = torch.randint(0, 256, (channels, 5, 7), dtype=torch.uint8)
    kind, _, content = images.png(pixels).partition(",")
    assert kind == "data:image/png;base64"
    decoded = np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))
    expected = pixels.permute(1, 2, 0).numpy() if channels == 3 else pixels[0].numpy()
    np.testing.assert_array_equal(decoded, expected)
