"""A trained model on disk: weights and everything needed to use them, in one file without code in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from dropmax.classifier import Classifier
from dropmax.data import Batches, Dataset, Split, normalise
from dropmax.errors import DropMaxError, InvalidValue, RunError
from dropmax.files import write_atomically
from dropmax.heads import make_head
from dropmax.networks import feature_size, make_network
from dropmax.recipes import Recipe, recipe_from_dict

__all__ = ["TrainedModel", "build", "load_model", "save_model"]


def build(recipe: Recipe, input_shape: tuple[int, ...], num_classes: int) -> Classifier:
    """Make the network and the head of a recipe, untrained.

    >>> from dropmax.recipes import load_recipe
    >>> build(load_recipe("mnist-1k"), (1, 28, 28), 10).head
    DropMax(in_features=500, num_classes=10)
    """
    options = dict(recipe.network)
    net = make_network(options.pop("name"), input_shape, **options)
    options = dict(recipe.head)
    head = make_head(options.pop("name"), feature_size(net, input_shape), num_classes, **options)
    return Classifier(net, head)


@dataclass(frozen=True)
class TrainedModel:
    """A classifier, and what its inputs and outputs mean."""

    model: Classifier
    recipe: Recipe
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    stored_size: int  #: side images are scaled to before their centre is cropped; 0 for features

    @property
    def is_images(self) -> bool:
        """Whether it takes images rather than feature vectors."""
        return len(self.input_shape) == 3

    def batches(self, split: Split, batch_size: int = 500) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches of a split, in order and as the network wants them."""
        device = next(self.model.parameters()).device
        for x, y in Batches(split, batch_size, self.mean, self.std, device=device):
            yield self._laid_out(x), y

    def prepare(self, inputs: Tensor) -> Tensor:
        """Turn uint8 images or raw features into what the network was trained on."""
        return self._laid_out(normalise(inputs, self.mean, self.std))

    def _laid_out(self, x: Tensor) -> Tensor:
        channels_last = self.is_images and self.recipe.training.channels_last
        return x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def save_model(path: Path, model: Classifier, recipe: Recipe, data: Dataset) -> None:
    """Write ``model.safetensors``, whole or not at all."""
    about = {
        "recipe": recipe.to_dict(),
        "classes": list(data.classes),
        "input_shape": list(data.input_shape),
        "stored_size": data.train.inputs.shape[-1] if data.is_images else 0,
        "mean": list(data.mean),
        "std": list(data.std),
    }
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    write_atomically(path, safetensors.torch.save(state, metadata={"dropmax": json.dumps(about)}))


def load_model(path: Path | str, *, device: torch.device | str = "cpu") -> TrainedModel:
    """Load a trained model from a run directory or a ``model.safetensors`` file."""
    path = Path(path)
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.exists():
        if (path / "recipe.toml").exists():
            raise RunError(f"the run {path} has not ended: go on with `dropmax train --resume {path}`")
        raise RunError(f"there is no trained model at {path}: `dropmax train` makes one")
    try:
        with safetensors.safe_open(file, framework="pt", device="cpu") as opened:
            about: dict[str, Any] = json.loads((opened.metadata() or {})["dropmax"])
        recipe = recipe_from_dict(about["recipe"], str(file))
        input_shape = tuple(about["input_shape"])
        model = build(recipe, input_shape, len(about["classes"]))
        model.load_state_dict(safetensors.torch.load_file(file))
        if recipe.training.channels_last and len(input_shape) == 3:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        trained = TrainedModel(
            model.eval(),
            recipe,
            tuple(about["classes"]),
            input_shape,
            tuple(about["mean"]),
            tuple(about["std"]),
            about["stored_size"],
        )
    except DropMaxError:
        raise
    except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(f"{file} is damaged or not a model of dropmax: {str(error).splitlines()[0]}") from error
    try:
        trained.model.to(device)
    except (RuntimeError, AssertionError) as error:  # what torch raises for a name it does not know, or no such device
        raise InvalidValue(f"cannot use the device {str(device)!r}: {str(error).splitlines()[0]}") from error
    return trained
