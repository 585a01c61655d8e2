"""Trained models as directories one can publish: ``save_pretrained``, ``from_pretrained``, ``push_to_hub``.

A directory holds ``model.safetensors`` (weights and what is needed to use them; no code), the ``recipe.toml`` it was
trained by, a card in ``README.md``, and its picture. Only talking to the Hugging Face hub needs the extra ``hub``.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import torch

from dropmax.errors import InvalidValue, RunError, first_line, optional
from dropmax.workbench.export import export
from dropmax.workbench.files import make_directory, write_atomically
from dropmax.workbench.model_card import draw_figure, measure, model_card
from dropmax.workbench.training import TrainedModel, load_model

__all__ = ["from_pretrained", "push_to_hub", "save_pretrained"]

_FILES = ("model.safetensors", "recipe.toml", "README.md", "confusable.png")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def save_pretrained(
    model: TrainedModel | Path | str,
    directory: Path | str,
    *,
    data_dir: Path | str | None = None,
    repository: str | None = None,
    force: bool = False,
    trust_code: bool = False,
) -> Path:
    """Write a trained model with its card into a directory, and return the directory.

    The card holds the validation metrics the run logged, and metrics and confusable classes of the test set. These are
    measured here if the data of the model can be found; the card says so where they cannot.

    Args:
        model: a run directory, a ``model.safetensors``, or what ``load_model`` returned.
        directory: where to write; new or empty, or with ``force`` one that holds such a model already.
        data_dir: where data sets are.
        repository: the name to show in the card for loading the model; that of the directory by default.
        force: whether files of an earlier call may be replaced; no others ever are.
        trust_code: as for :func:`~dropmax.workbench.training.load_model`.

    >>> import tempfile
    >>> from dropmax.workbench.recipes import load_recipe
    >>> from dropmax.workbench.training import train
    >>> place = Path(tempfile.mkdtemp())
    >>> recipe = load_recipe("mnist-1k").override({"training.epochs": 1, "data.train_size": 100})
    >>> run = train(recipe, place / "run", quiet=True)
    >>> sorted(path.name for path in save_pretrained(run.path, place / "model").iterdir())
    ['README.md', 'confusable.png', 'model.safetensors', 'recipe.toml']
    >>> from_pretrained(place / "model").model.head.name
    'dropmax'
    """
    place = Path(directory)
    _check_place(place, force)
    if isinstance(model, TrainedModel):
        trained, run = model, None
    else:
        path = Path(model)
        trained, run = load_model(path, trust_code=trust_code), path if path.is_dir() else path.parent
    found = measure(trained, run, data_dir)
    # Everything is made beside its place first, so that a failure leaves no half of a model there.
    with tempfile.TemporaryDirectory(prefix="dropmax-") as scratch:
        folder = Path(scratch)
        export(trained, folder / "model.safetensors", format="safetensors")
        write_atomically(folder / "recipe.toml", trained.recipe.to_toml())
        figure = "confusable.png" if draw_figure(folder / "confusable.png", trained, found) else None
        card = model_card(trained, found, repository=repository or str(directory), figure=figure)
        write_atomically(folder / "README.md", card)
        make_directory(place)
        for name in _FILES:
            if (folder / name).exists():
                write_atomically(place / name, (folder / name).read_bytes())
            else:
                (place / name).unlink(missing_ok=True)  # a picture of an earlier model
    return place


def from_pretrained(
    name: Path | str,
    *,
    revision: str | None = None,
    token: str | None = None,
    device: torch.device | str = "cpu",
    trust_code: bool = False,
) -> TrainedModel:
    """Load a trained model from a directory, or download it from a repository ``owner/name``.

    Args:
        name: a directory of :func:`save_pretrained`, a run directory, a ``model.safetensors``, or ``owner/name``.
        revision: branch, tag or commit of the repository.
        token: of a private repository; huggingface_hub looks for a saved one by default.
        device: where to put the model.
        trust_code: as for :func:`~dropmax.workbench.training.load_model`.

    >>> from_pretrained("no such place")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dropmax.errors.RunError: there is no directory or file 'no such place', and it is not a repository 'owner/name': ...
    """
    if Path(name).exists():
        return load_model(name, device=device, trust_code=trust_code)
    if not _REPOSITORY.fullmatch(str(name)):
        raise RunError(
            f"there is no directory or file {str(name)!r}, and it is not a repository 'owner/name': nothing to load"
        )
    hub = optional("huggingface_hub", "hub", "downloading a model")
    try:
        file = hub.hf_hub_download(str(name), "model.safetensors", revision=revision, token=token)
    except Exception as error:  # a dozen classes of it, each of which means that there is no file
        raise RunError(f"cannot download model.safetensors of {name}: {first_line(error)}") from error
    return load_model(file, device=device, trust_code=trust_code)


def push_to_hub(
    model: TrainedModel | Path | str,
    repository: str,
    *,
    data_dir: Path | str | None = None,
    private: bool = False,
    token: str | None = None,
    message: str = "Upload a model trained with dropmax",
    api: Any = None,
    trust_code: bool = False,
) -> str:
    """Upload a trained model with its card to the repository ``owner/name``, created if needed; return its address.

    A directory of :func:`save_pretrained` is uploaded as it is, so that a card can be looked over and edited first;
    anything else goes through :func:`save_pretrained`. Only the files named there are uploaded.

    Args:
        model: as for :func:`save_pretrained`, or a directory it made.
        repository: ``owner/name``.
        data_dir: where data sets are.
        private: whether a new repository is private.
        token: with permission to write; huggingface_hub looks for a saved one by default.
        message: of the commit.
        api: a ``huggingface_hub.HfApi`` of your own, for another endpoint.
        trust_code: as for :func:`~dropmax.workbench.training.load_model`.
    """
    if not _REPOSITORY.fullmatch(repository):
        raise InvalidValue(f"a repository is named owner/name, got {repository!r}")
    if api is None:
        api = optional("huggingface_hub", "hub", "uploading a model").HfApi(token=token)
    with tempfile.TemporaryDirectory(prefix="dropmax-") as scratch:
        if not isinstance(model, TrainedModel) and all((Path(model) / name).is_file() for name in _FILES[:3]):
            folder = Path(model)  # saved already
        else:
            folder = save_pretrained(
                model, Path(scratch) / "model", data_dir=data_dir, repository=repository, trust_code=trust_code
            )
        try:
            url = api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=repository, folder_path=str(folder), commit_message=message, allow_patterns=list(_FILES)
            )
        except Exception as error:
            raise RunError(f"cannot upload to {repository}: {first_line(error)}") from error
    return str(url)


def _check_place(place: Path, force: bool) -> None:
    if place.exists() and not place.is_dir():
        raise RunError(f"{place} is not a directory: choose another place")
    there = {path.name for path in place.iterdir()} if place.exists() else set()
    if "environment.json" in there:
        raise RunError(f"{place} is a run directory: choose another place for the model")
    if there and not force:
        raise RunError(f"{place} is not empty: replace the model in it with --force, or choose another place")
    if strangers := sorted(there - {*_FILES, ".git", ".gitattributes"}):
        raise RunError(f"{place} holds {strangers[0]!r}, which is not part of a saved model: choose another place")
