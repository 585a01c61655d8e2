"""The photographs and sentences behind a model's features."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from dropmax.errors import DataError
from dropmax.workbench.backbones import Backbone, Origin, reload_backbone
from dropmax.workbench.data import Split
from dropmax.workbench.data.images import decode
from dropmax.workbench.training import TrainedModel

__all__ = ["Originals"]


class Originals:
    """What a person wants to see in place of rows of features.

    Args:
        trained: the model; one without a pretrained network in front of it has nothing to show here.
        split: the rows; ``split.shown`` names them.
        root: the folder of photographs; without it only their names are known.
    """

    def __init__(self, trained: TrainedModel, split: Split, root: Path | None) -> None:
        self._origin, self._shown, self._root = trained.origin, split.shown, root
        self.kind = Origin.from_json(trained.origin).kind if trained.origin else ""  #: "images", "text" or nothing

    @property
    def backbone(self) -> Backbone:
        """The pretrained network, for new photographs and sentences."""
        return reload_backbone(self._origin)

    def text(self, index: int) -> str | None:
        """Return the sentence behind a row."""
        return self._shown[index] if self.kind == "text" and self._shown else None

    def picture(self, index: int, side: int) -> NDArray[np.uint8] | None:
        """Return the centre square (3, side, side) of the photograph behind a row; None where it cannot be found."""
        if self.kind != "images" or self._root is None or not self._shown:
            return None
        name = PurePosixPath(self._shown[index])
        if name.is_absolute() or ".." in name.parts:  # a file of features may come from anybody
            return None
        try:
            return decode(self._root / name, side)
        except (DataError, OSError):
            return None
