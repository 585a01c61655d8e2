"""A trained model on disk: weights and everything needed to use them, in one file without code in it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from dropmax.calibration import Calibration
from dropmax.classifier import Classifier
from dropmax.errors import DropMaxError, InvalidValue, RunError, first_line
from dropmax.heads import make_head
from dropmax.imports import check_import
from dropmax.workbench.backbones import Origin
from dropmax.workbench.data import Batches, Dataset, Split, normalise, statistics
from dropmax.workbench.data.mnist import is_like_mnist
from dropmax.workbench.data.unlabelled import Expected
from dropmax.workbench.evaluation import Outputs, answer
from dropmax.workbench.files import parse_json, write_atomically
from dropmax.workbench.networks import feature_size, make_network
from dropmax.workbench.networks.common import initialise_head
from dropmax.workbench.recipes import Recipe, recipe_from_dict

_MOST_STORED = 2304  # the side of stored images for the largest image_size, 2048


def build(recipe: Recipe, input_shape: tuple[int, ...], num_classes: int) -> Classifier:
    """Make the network and the head of a recipe, untrained.

    >>> from dropmax.workbench.recipes import load_recipe
    >>> build(load_recipe("own-images.default"), (1, 28, 28), 10).head
    DropMax(in_features=256, num_classes=10)
    """
    options = dict(recipe.network)
    net = make_network(options.pop("name"), input_shape, **options)
    options = dict(recipe.head)
    head = make_head(options.pop("name"), feature_size(net, input_shape), num_classes, **options)
    initialise_head(head, recipe.training.head_init)
    return Classifier(net, head)


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A classifier, and what its inputs and outputs mean."""

    model: Classifier
    recipe: Recipe
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    stored_size: int  #: side images are scaled to before their centre is cropped; 0 for features
    columns: tuple[str, ...] = ()  #: names of the features, where it was trained on a table with a header
    brightness: tuple[float, float] | None = None  #: mean and deviation of the training images' pixels, in [0, 1]
    origin: str = ""  #: for features of a pretrained network, its description

    @property
    def calibration(self) -> Calibration | None:
        """What held-out rows said about it; None where it has not been calibrated."""
        return self.model.head.calibration

    def about(self) -> dict[str, Any]:
        """Return what ``model.safetensors`` says about the model, and :func:`load_model` reads."""
        values: dict[str, Any] = {
            "recipe": self.recipe.to_dict(),
            "classes": list(self.classes),
            "input_shape": list(self.input_shape),
            "stored_size": self.stored_size,
            "mean": list(self.mean),
            "std": list(self.std),
            "columns": list(self.columns),
            "origin": self.origin,
        }
        if self.brightness is not None:
            values["brightness"] = list(self.brightness)
        if self.calibration is not None:
            values["calibration"] = self.calibration.to_dict()
        return values

    def to_bytes(self, **more: Any) -> bytes:
        """Return the weights with :meth:`about`, and more, as the content of a safetensors file."""
        state = {name: value.detach().cpu().contiguous() for name, value in self.model.state_dict().items()}
        return safetensors.torch.save(state, metadata={"dropmax": json.dumps(self.about() | more)})

    @property
    def is_images(self) -> bool:
        """Whether it takes images rather than feature vectors."""
        return len(self.input_shape) == 3

    @property
    def expected(self) -> Expected:
        """What new rows must look like: shape, columns, classes, and whether to prepare images as MNIST's digits."""
        data, mean = self.recipe.data, None if self.brightness is None else self.brightness[0]
        digits = is_like_mnist(data.name, self.input_shape, self.classes, mean)
        return Expected(
            self.input_shape, self.stored_size, self.columns, self.classes, data.label_column or "label",
            data.id_column, digits, self.origin, data.text_column,
        )  # fmt: skip

    def batches(self, split: Split, batch_size: int = 500) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches of a split, in order and as the network wants them."""
        device = next(self.model.parameters()).device
        for x, y in Batches(split, batch_size, self.mean, self.std, device=device):
            yield self._laid_out(x), y

    @torch.no_grad()
    def answer(self, inputs: Tensor, **options: Any) -> Outputs:
        """Return the model's answers for uint8 images or raw features; options are those of ``evaluation.answer``."""
        device = next(self.model.parameters()).device
        return answer(self.model.head, self.model.net(self.prepare(inputs.to(device))), **options)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Turn uint8 images or raw features into what the network was trained on."""
        return self._laid_out(normalise(inputs, self.mean, self.std))

    def _laid_out(self, x: Tensor) -> Tensor:
        channels_last = self.is_images and self.recipe.training.channels_last
        return x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def save_model(path: Path, model: Classifier, recipe: Recipe, data: Dataset) -> None:
    """Write ``model.safetensors``, whole or not at all, and ``calibration.json`` beside it."""
    brightness, size = None, 0
    if data.is_images:
        mean, std = statistics(data.train.inputs)
        brightness, size = (sum(mean) / len(mean), sum(std) / len(std)), data.train.inputs.shape[-1]
    about = data.classes, data.input_shape, data.mean, data.std, size, data.columns, brightness, data.origin
    write_model(path, TrainedModel(model, recipe, *about))


def write_model(path: Path, trained: TrainedModel) -> None:
    """Write a model, and what is known of its calibration beside it for people to read."""
    beside = path.with_name("calibration.json")
    if trained.calibration is None:
        beside.unlink(missing_ok=True)
    else:
        write_atomically(beside, json.dumps(trained.calibration.to_dict(), indent=1) + "\n")
    write_atomically(path, trained.to_bytes())


def load_model(path: Path | str, *, device: torch.device | str = "cpu", trust_code: bool = False) -> TrainedModel:
    """Load a trained model from a run directory or a ``model.safetensors`` file.

    The file may come from anybody: nothing in it is executed, and memory is taken for the tensors it holds, not for
    those it claims.

    Args:
        path: the run directory, or the file.
        device: where to put the model.
        trust_code: networks and heads of dropmax always load. One that the file names as ``package.module:ClassName``
            loads if your program has imported that module; or else only if you say that you trust it, as importing
            runs it.

    >>> load_model("no-such-run")
    Traceback (most recent call last):
    dropmax.errors.RunError: there is no trained model at no-such-run: `dropmax train` makes one
    """
    path = Path(path)
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.exists():
        if (path / "recipe.toml").exists():
            raise RunError(f"the run {path} has not ended: resume it with `dropmax train --resume {path}`")
        raise RunError(f"there is no trained model at {path}: `dropmax train` makes one")
    try:
        # From bytes: load_file and safe_open of safetensors 0.8 never give back the memory of the tensors' names.
        content = file.read_bytes()
        tensors = safetensors.torch.load(content)
        header = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")].decode())
        about = _read_about(json.loads(header["__metadata__"]["dropmax"]))
        recipe = recipe_from_dict(about["recipe"], str(file))
        check_imports(recipe, str(file), trust_code)
        input_shape, classes = tuple(about["input_shape"]), tuple(about["classes"])
        held = {name: tuple(value.shape) for name, value in tensors.items()}
        if _shapes(recipe, input_shape, len(classes)) not in (held, None):
            raise ValueError("its tensors are not those of the network and head it names")
        model = build(recipe, input_shape, len(classes))
        model.load_state_dict(tensors)
        if about.get("calibration") is not None:
            model.head.calibration = Calibration.from_dict(about["calibration"], len(classes))
        if recipe.training.channels_last and len(input_shape) == 3:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    except DropMaxError:
        raise
    except (
        safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError, OverflowError,
    ) as error:  # fmt: skip
        raise RunError(f"{file} is damaged or not a model of dropmax: {first_line(error)}") from error
    trained = TrainedModel(
        model.eval(), recipe, classes, input_shape, tuple(about["mean"]), tuple(about["std"]), about["stored_size"],
        tuple(about.get("columns", ())), tuple(about["brightness"]) if "brightness" in about else None,
        about.get("origin", ""),
    )  # fmt: skip
    try:
        trained.model.to(device)
    except (RuntimeError, AssertionError) as error:  # what torch raises for a name it does not know, or no such device
        raise InvalidValue(f"cannot use the device {str(device)!r}: {first_line(error)}") from error
    return trained


def check_imports(recipe: Recipe, source: str, trust_code: bool) -> None:
    """Raise where a recipe that came in the file ``source`` names code to import without consent."""
    for what, table in (("network", recipe.network), ("head", recipe.head)):
        check_import(what, table["name"], source, trust_code)


def _shapes(recipe: Recipe, input_shape: tuple[int, ...], num_classes: int) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of a model's tensors without making them: a short file can name a network of gigabytes.

    A network or head from elsewhere may not know how to be made without numbers: then None.
    """
    head = {key: value for key, value in recipe.head.items() if key != "class_weight"}  # its values are looked at
    try:
        with torch.device("meta"):
            model = build(dataclasses.replace(recipe, head=head), input_shape, num_classes)
    except Exception:
        if recipe.imports_code:
            return None
        raise
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def _read_about(about: Any) -> dict[str, Any]:
    """Check the kinds of what a file says about its model."""

    def is_list(value: Any, *kinds: type) -> bool:
        return isinstance(value, list) and all(type(item) in kinds for item in value)

    json.dumps(about, ensure_ascii=False).encode()  # a ValueError where a name holds half of a surrogate pair
    if not isinstance(about, dict) or not isinstance(about["recipe"], dict):
        raise ValueError("its description is not a table")
    if not is_list(about["classes"], str):
        raise ValueError("its classes are not a list of names")
    shape, size = about["input_shape"], about["stored_size"]
    if not is_list(shape, int) or not shape or min(shape) < 1:
        raise ValueError(f"its input_shape is {shape!r:.60}")
    if type(size) is not int or not (len(shape) != 3 or max(shape[1:]) <= size <= _MOST_STORED):
        raise ValueError(f"its stored_size is {size!r:.60}")
    if about.get("origin", ""):
        Origin.from_json(about["origin"])
    columns, brightness = about.get("columns", []), about.get("brightness", [0.0, 1.0])
    if not is_list(columns, str) or len(columns) not in (0, shape[0]) or (columns and len(shape) != 1):
        raise ValueError("its columns are not one name per feature")
    if not is_list(brightness, int, float) or len(brightness) != 2 or not all(0 <= x <= 1 for x in brightness):
        raise ValueError("its brightness is not a mean and a deviation between 0 and 1")
    for name in ("mean", "std"):
        values = about[name]
        if not is_list(values, int, float) or not all(math.isfinite(value) for value in values):
            raise ValueError(f"its {name} holds something other than finite numbers")
        if len(values) != shape[0] or (name == "std" and not all(value > 0 for value in values)):
            raise ValueError(f"its {name} does not fit inputs of shape {tuple(shape)}")
    return about
