"""Data sets: readers for the publishers' files and for your own, splits by seed, batches from memory."""

from __future__ import annotations

from dropmax.workbench.data.batches import Augment, Batches, crop_and_flip, normalise
from dropmax.workbench.data.catalogue import NAMES, cache_directory, data_directory
from dropmax.workbench.data.checks import Finding, check, inventory
from dropmax.workbench.data.dataset import Dataset, Split, statistics
from dropmax.workbench.data.download import fetch
from dropmax.workbench.data.loading import load

__all__ = [
    "NAMES", "Augment", "Batches", "Dataset", "Finding", "Split", "cache_directory", "check", "crop_and_flip",
    "data_directory", "fetch", "inventory", "load", "normalise", "statistics",
]  # fmt: skip
