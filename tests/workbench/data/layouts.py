"""Tiny files of every layout, written by their definitions and not by the code under test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def idx_bytes(array: np.ndarray) -> bytes:
    """Write an idx file by its definition."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def picture(path: Path, colour: tuple[int, int, int] = (200, 30, 30), size: tuple[int, int] = (20, 16)) -> Path:
    """Save a plain picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def image_folder(root: Path, classes: dict[str, int], suffix: str = ".png") -> Path:
    """Make a folder a class with so many pictures in it, each of another shade."""
    for k, (name, count) in enumerate(classes.items()):
        for n in range(count):
            picture(root / name / f"{n:03d}{suffix}", (40 * k, n % 256, 10))
    return root


def write_cifar(path: Path, labels: list[tuple[int, ...]], seed: int = 0) -> np.ndarray:
    """Write CIFAR records with these label bytes and random pixels, which are returned as (N, 3, 32, 32)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), 3, 32, 32), np.uint8)
    path.write_bytes(b"".join(bytes(label) + image.tobytes() for label, image in zip(labels, pixels, strict=True)))
    return pixels


def write_cub(root: Path, classes: int = 3, a_class: int = 4) -> Path:
    """Write CUB's tables and images: even images of a class train, odd ones test."""
    names = [f"{k + 1:03d}.Bird_number_{k}" for k in range(classes)]
    images, labels, split = [], [], []
    for k, name in enumerate(names):
        for n in range(a_class):
            number = len(images) + 1
            picture(root / "images" / name / f"bird_{n}.jpg", (60 * k, 30 * n, 0))
            images.append(f"{number} {name}/bird_{n}.jpg")
            labels.append(f"{number} {k + 1}")
            split.append(f"{number} {1 - n % 2}")
    for file, lines in (
        ("images.txt", images),
        ("image_class_labels.txt", labels),
        ("train_test_split.txt", split),
        ("classes.txt", [f"{k + 1} {name}" for k, name in enumerate(names)]),
    ):
        (root / file).write_text("\n".join(lines) + "\n")
    return root
