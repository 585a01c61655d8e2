"""Data sets: readers for the publishers' files and for your own, splits by seed, batches from memory."""

from __future__ import annotations

from dropmax.data.batches import Augment, Batches, crop_and_flip, normalise
from dropmax.data.catalogue import NAMES, cache_directory, data_directory
from dropmax.data.checks import Finding, check, inventory
from dropmax.data.dataset import Dataset, Split, statistics
from dropmax.data.download import fetch
from dropmax.data.loading import load

__all__ = [
    "NAMES",
    "Augment",
    "Batches",
    "Dataset",
    "Finding",
    "Split",
    "cache_directory",
    "check",
    "crop_and_flip",
    "data_directory",
    "fetch",
    "inventory",
    "load",
    "normalise",
    "statistics",
]
