"""A trained model as one file that needs no dropmax to serve it: ONNX, ``torch.export``, or safetensors.

The first two carry their own preprocessing: they take raw uint8 images of the stored size, or raw features, and crop
and normalise inside the graph. All three hold the same metadata, under the key ``dropmax``, as JSON.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dropmax.checks import check_choice
from dropmax.errors import DropMaxError, InvalidType, RunError, first_line, optional
from dropmax.exact import portable
from dropmax.heads.masked import MaskedHead
from dropmax.workbench.backbones import Backbone, Origin, reload_backbone
from dropmax.workbench.data import normalise
from dropmax.workbench.data.images import centre_crop
from dropmax.workbench.files import write_atomically
from dropmax.workbench.provenance import commit
from dropmax.workbench.terminal import progress
from dropmax.workbench.training import TrainedModel, load_model

__all__ = ["FORMATS", "OUTPUTS", "Served", "export", "metadata", "raw_shape"]

FORMATS = ("onnx", "torch-export", "safetensors")

#: The named outputs of an exported graph, each (N, K) in float32.
OUTPUTS = {
    "probabilities": "the answer: class probabilities of the calibrated mode; of the mean without calibration",
    "mean": "class probabilities with rho in place of the masks, softmax(o + log rho)",
    "exact": "class probabilities averaged over all masks",
    "retain": "retain probabilities rho; ones for a head without masks",
    "std": "standard deviation of the class probabilities over the masks",
}

#: An exported file whose answers differ from PyTorch's by more than this is not written. Rounding stays below 1e-5.
LARGEST_DIFFERENCE = 1e-4


class Served(nn.Module):
    """What an exported graph computes: raw inputs in, the five :data:`OUTPUTS` out, by name.

    >>> from dropmax.workbench.recipes import load_recipe
    >>> from dropmax.workbench.training import build
    >>> recipe = load_recipe("mnist-1k")
    >>> digits = tuple("0123456789")
    >>> trained = TrainedModel(build(recipe, (1, 28, 28), 10).eval(), recipe, digits, (1, 28, 28), (0.1,), (0.3,), 28)
    >>> sorted(Served(trained)(torch.zeros(2, 1, 28, 28, dtype=torch.uint8)))
    ['exact', 'mean', 'probabilities', 'retain', 'std']
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, trained: TrainedModel) -> None:
        super().__init__()
        found = pretrained(trained)
        self.backbone = None if found is None else copy.deepcopy(found.graph)
        if self.backbone is not None:
            self.backbone.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        self.model = copy.deepcopy(trained.model).cpu().float().eval().requires_grad_(False)
        self.model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        self.window = trained.input_shape[1:]  # height and width of the centre crop; () for features
        self.register_buffer("shift", torch.tensor(trained.mean, dtype=torch.float32))
        self.register_buffer("scale", torch.tensor(trained.std, dtype=torch.float32))

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        """Crop, normalise, and predict."""
        if self.backbone is not None:
            inputs = self.backbone(inputs)
        if self.window:
            inputs = centre_crop(inputs, *self.window)
        features = self.model.net(normalise(inputs, self.shift, self.scale))
        head = self.model.head
        answers = {"mean": head.predict_proba(features), "retain": head.retain_probs(features)}
        if isinstance(head, MaskedHead) and torch.compiler.is_compiling():
            # One walk over the nodes for both: mean and second moment.
            first, second = portable.moments(head.classifier(features), head.retain(features), order=2)
            answers |= {"exact": first.float(), "std": (second - first.square()).clamp_min(0).sqrt().float()}
        else:
            answers |= {"exact": head.predict_proba(features, "exact"), "std": head.predictive_std(features)}
        answers["probabilities"] = answers["mean"]
        if head.calibration is not None:
            answers["probabilities"] = head.calibration.apply(answers[head.calibration.mode])
        return {name: answers[name] for name in OUTPUTS}


def pretrained(trained: TrainedModel) -> Backbone | None:
    """Return the pretrained network that becomes a part of the graph, where there is one that can."""
    if not trained.origin or Origin.from_json(trained.origin).kind != "images":
        return None
    found = reload_backbone(trained.origin)
    return None if found.graph is None else found


def _why_features(trained: TrainedModel) -> str:
    """Say why a graph of a model behind a pretrained network takes features all the same."""
    if not trained.origin or pretrained(trained) is not None:
        return ""
    origin = Origin.from_json(trained.origin)
    reason = "a tokenizer is not a tensor operation" if origin.kind == "text" else "torch.export cannot follow it"
    return f"it takes the features of {origin.short}, because {reason}: make them with `dropmax embed`"


def raw_shape(trained: TrainedModel) -> tuple[int, ...]:
    """Return the shape of one raw input: (C, H, W) as stored, before the centre crop, or (D,)."""
    if (backbone := pretrained(trained)) is not None:
        return (3, backbone.image_size, backbone.image_size)
    if not trained.is_images or trained.stored_size == trained.input_shape[-1]:
        return trained.input_shape
    return (trained.input_shape[0], trained.stored_size, trained.stored_size)


def metadata(trained: TrainedModel) -> dict[str, Any]:
    """Return what an exported file says about itself; ``load_model`` reads the first part."""
    from dropmax import __version__

    return trained.about() | {
        "head": trained.model.head.config(),
        "inputs": {
            "name": "inputs",
            "dtype": "uint8" if len(raw_shape(trained)) == 3 else "float32",
            "shape": ["batch", *raw_shape(trained)],
        },
        "backbone": json.loads(trained.origin) if trained.origin else None,
        "outputs": OUTPUTS,
        "version": __version__,
        "commit": commit(),
    }


def export(
    run: Path | str | TrainedModel,
    out: Path | str,
    *,
    format: str = "onnx",
    force: bool = False,
    trust_code: bool = False,
) -> dict[str, Any]:
    """Write a trained model to one file for serving, and return what was found out about it.

    A graph is run before it is written, on random inputs in batches of 1, 2 and 7, and compared with PyTorch. Returned
    are ``file``, ``format``, ``bytes``, and the ``largest_difference`` of any output (0 for safetensors, which holds
    the weights themselves). A model behind a pretrained network for photographs becomes one graph from pixels to
    answers; where that cannot be, ``note`` says why the graph takes features.

    Args:
        run: a run directory, a ``model.safetensors``, or a loaded model.
        out: the file to write.
        format: ``"onnx"`` (needs the extra ``export``), ``"torch-export"`` or ``"safetensors"``.
        force: whether a file that is there already may be replaced.
        trust_code: as for :func:`~dropmax.workbench.training.load_model`.

    >>> export("no-such-run", "model.bin", format="pickle")
    Traceback (most recent call last):
    dropmax.errors.InvalidValue: unknown format 'pickle': Valid are onnx, torch-export, safetensors
    """
    check_choice("format", format, FORMATS)
    path = Path(out)
    _refuse_to_overwrite(path, force)
    for package in ("onnx", "onnxscript", "onnxruntime") if format == "onnx" else ():
        optional(package, "export", "exporting to ONNX")  # before the work, not after it
    trained = _trained(run, trust_code)
    about = metadata(trained)
    difference = 0.0
    with progress(f"exporting to {format}", 3, "stages") as advance:
        if format == "safetensors":
            content = trained.to_bytes(**about)
            advance(3)
        else:
            served = Served(trained)
            to_bytes, runner = (_to_onnx, _onnx_runner) if format == "onnx" else (_to_torch_export, _torch_runner)
            content = to_bytes(served, _random_inputs(trained, 2), json.dumps(about))
            advance(2)
            difference = _largest_difference(served, runner(content), trained)
            advance(1)
    if not difference <= LARGEST_DIFFERENCE:
        raise RunError(
            f"the exported {format} graph differs from PyTorch by {difference:.1e}, more than {LARGEST_DIFFERENCE:g}: "
            "nothing was written"
        )
    write_atomically(path, content)
    found = {"file": str(path), "format": format, "bytes": len(content), "largest_difference": difference}
    note = "" if format == "safetensors" else _why_features(trained)
    return found | ({"note": note} if note else {})


def _trained(run: Any, trust_code: bool) -> TrainedModel:
    if isinstance(run, TrainedModel):
        return run
    if isinstance(run, (str, Path)):
        return load_model(run, trust_code=trust_code)
    kind = type(run).__name__
    hint = (
        "a network alone does not say how its inputs are normalised or what its classes are called. Build a "
        "dropmax.workbench.training.TrainedModel(model, recipe, classes, input_shape, mean, std, stored_size), or give "
        "the model itself to torch.export"
    )
    if not isinstance(run, nn.Module):
        hint = "train with `dropmax train` to have one; a fitted estimator's network is its model_, for torch.export"
    raise InvalidType(f"export takes a run directory, a model file or a TrainedModel, not a {kind}: {hint}")


def _refuse_to_overwrite(path: Path, force: bool) -> None:
    if path.is_dir():
        raise RunError(f"{path} is a directory: name a file with --out")
    if path.exists() and not force:
        raise RunError(f"{path} exists: replace it with --force, or choose another file with --out")
    if not path.parent.is_dir():
        raise RunError(f"there is no directory {path.parent} to write {path.name} into: make it first")


def _random_inputs(trained: TrainedModel, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, *raw_shape(trained))
    if len(shape) == 4:
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    return torch.tensor(trained.mean) + torch.tensor(trained.std) * torch.randn(shape, generator=generator)


Runner = Callable[[Tensor], dict[str, Tensor]]


def _largest_difference(served: Served, runner: Runner, trained: TrainedModel) -> float:
    differences = []
    for count in (1, 2, 7):
        inputs = _random_inputs(trained, count, seed=count)
        with torch.no_grad():
            expected, found = served(inputs), runner(inputs)
        differences += [(found[name] - expected[name]).abs().max() for name in OUTPUTS]
    return float(torch.stack(differences).max())  # NaN, if any is


# --- torch.export ------------------------------------------------------------------------------------------------


def _program(served: Served, example: Tensor) -> torch.export.ExportedProgram:
    try:
        with _quiet(), torch.no_grad():
            shapes = {"inputs": {0: torch.export.Dim.DYNAMIC}}
            program: torch.export.ExportedProgram = torch.export.export(served, (example,), dynamic_shapes=shapes)
            # ONNX would take log(sigmoid(x)), and onnxruntime's sigmoid in float32 is 0 at -20 already.
            log_sigmoid = torch.ops.aten.log_sigmoid.default
            if any(node.target is log_sigmoid for node in program.graph.nodes):
                stable = {log_sigmoid: lambda x: x.clamp_max(0) - torch.log1p(torch.exp(-x.abs()))}
                program = program.run_decompositions(stable)
    except DropMaxError:
        raise
    except Exception as error:  # whatever a network of the user's own does that no graph can hold
        raise RunError(f"torch.export cannot turn this model into a graph: {first_line(error)}") from error
    for graph in program.graph_module.modules():
        for node in graph.graph.nodes if isinstance(graph, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # holds the paths of this machine
    return program


def _to_torch_export(served: Served, example: Tensor, about: str) -> bytes:
    buffer = io.BytesIO()
    with _quiet():
        torch.export.save(_program(served, example), buffer, extra_files={"dropmax": about})
    return buffer.getvalue()


def _torch_runner(content: bytes) -> Runner:
    with _quiet():
        module: Runner = torch.export.load(io.BytesIO(content)).module()
    return module


# --- ONNX --------------------------------------------------------------------------------------------------------


def _to_onnx(served: Served, example: Tensor, about: str) -> bytes:
    with _quiet():
        exported = torch.onnx.export(_program(served, example), dynamo=True, input_names=["inputs"], verbose=False)
    if exported is None:
        raise RunError("torch.onnx.export returned nothing: this torch is too old, upgrade it")
    _name_outputs(exported.model.graph)
    model = exported.model_proto
    _forget_sources(model.graph)
    entry = model.metadata_props.add()
    entry.key, entry.value = "dropmax", about
    content: bytes = model.SerializeToString()
    return content


def _name_outputs(graph: Any) -> None:
    """Name the outputs; whatever in the graph has such a name already, say the mean of a pooling layer, makes room."""
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.name in OUTPUTS:
                value.name = f"inner_{value.name}"
    for value, name in zip(graph.outputs, OUTPUTS, strict=True):
        value.name = name


def _forget_sources(graph: Any) -> None:
    """Delete the notes on where in the source each node came from: they hold the paths of this machine."""
    del graph.metadata_props[:]
    for value in (*graph.value_info, *graph.input, *graph.output):
        del value.metadata_props[:]
    for node in graph.node:
        del node.metadata_props[:]
        node.ClearField("doc_string")
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _forget_sources(attribute.g)


def _onnx_runner(content: bytes) -> Runner:
    onnxruntime = optional("onnxruntime", "export", "exporting to ONNX")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def run(inputs: Tensor) -> dict[str, Tensor]:
        found = session.run(list(OUTPUTS), {"inputs": inputs.numpy()})
        return {name: torch.from_numpy(value) for name, value in zip(OUTPUTS, found, strict=True)}

    return run


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporters' notes about themselves away from the user."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
