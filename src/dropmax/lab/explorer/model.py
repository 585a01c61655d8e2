"""What the explorer knows: a trained model, its answers on the test examples, and its answer to anything new."""

from __future__ import annotations

import contextlib
import math
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dropmax.checks import NotFinite
from dropmax.errors import DataError, RunError
from dropmax.heads.masked import MaskedHead, sampled
from dropmax.lab import images
from dropmax.lab.images import Originals
from dropmax.workbench.data import Split
from dropmax.workbench.data.images import centre_crop
from dropmax.workbench.evaluation import Outputs, answer, confusions, predict
from dropmax.workbench.terminal import progress
from dropmax.workbench.training import TrainedModel, load_data, load_model
from dropmax.workbench.training.rundir import data_place

__all__ = ["Explorer", "shown_name"]

PAGE = 48
MASKS = 8
NOISE_LEVELS = tuple(step / 20 for step in range(21))
MOST_CLASSES = 1000
MAP_CLASSES = 200
TILE, SEEN = 96, 264  # pixels: of a picture in the grid, and of one that is looked at
SENTENCE = 300


class Explorer:
    """A trained model beside the test examples of its data, measured once; every method returns plain JSON values.

    Predictions are the calibrated answer, as everywhere. An example is as hard as the truth is improbable.
    """

    def __init__(
        self, trained: TrainedModel, test: Split, name: str, beside: Explorer | None = None, root: Path | None = None
    ) -> None:
        if test.input_shape != trained.input_shape:
            trained_on = f"{name} was trained on {trained.input_shape}: its data changed since"
            raise RunError(f"the test examples have the shape {test.input_shape}, but {trained_on}")
        if len(trained.classes) > MOST_CLASSES:
            raise RunError(
                f"{name} has {len(trained.classes):,} classes; the explorer shows up to {MOST_CLASSES:,}. "
                "`dropmax evaluate` and `dropmax predict` take any number"
            )
        if not len(test):
            raise DataError(f"the data of {name} has no test examples to explore")
        self.trained, self.test, self.name = trained, test, name
        self.originals = Originals(trained, test, root)
        if beside is not None and beside._kind() != self._kind():
            both = f"{beside.name} and {name}"
            raise RunError(f"{both} were not trained on the same classes and inputs: explore them alone")
        self.beside = beside
        self.classes = [shown_name(label, k) for k, label in enumerate(trained.classes)]
        self._measure()

    def _kind(self) -> tuple[Any, ...]:
        return self.trained.classes, self.test.input_shape, self.trained.origin

    @classmethod
    def open(
        cls,
        run: Path | str,
        *,
        beside: Path | str | None = None,
        data_dir: Path | str | None = None,
        moved: Path | str | None = None,
        device: str = "cpu",
        trust_code: bool = False,
    ) -> Explorer:
        """Load a run directory (or a ``model.safetensors``), a second run to show beside it, and their data.

        ``moved`` is where the data is now, if it is no longer where the run found it.
        """
        other = None
        if beside is not None:
            other = cls.open(beside, data_dir=data_dir, moved=moved, device=device, trust_code=trust_code)
        trained = load_model(run, device=device, trust_code=trust_code)
        data = load_data(trained.recipe, data_dir, run=run, data=moved)
        if data.classes != trained.classes:
            raise RunError(f"the classes of {trained.recipe.data.name} are not those {run} was trained on")
        path, root = Path(run), Path(data_place(trained.recipe, run, moved)).expanduser()
        return cls(trained, data.test, path.resolve().name if path.is_dir() else path.name, other, root)

    def about(self) -> dict[str, Any]:
        """Return what the page needs to know first."""
        recipe, other = self.trained.recipe, self.beside
        beside = None
        if other is not None:
            beside = {key: other.about()[key] for key in ("run", "head", "network", "error")}
            beside["differ"] = int((self._predicted != other._predicted).sum())
        return {
            "run": shown_name(self.name),
            "head": recipe.head["name"],
            "network": shown_name(str(recipe.network["name"])),
            "data": shown_name(Path(recipe.data.name).name),
            "classes": self.classes,
            "images": self.trained.is_images,
            "uploads": self.takes_images,
            "sentences": self.originals.kind == "text",
            "drawing": self.takes_drawings,
            "shape": list(self.trained.input_shape),
            "masks": _masks_of(self.trained.model.head),
            "coverage": None if self.trained.calibration is None else self.trained.calibration.coverage,
            "examples": len(self.test),
            "error": _rounded((self._predicted != self._labels).mean()),
            "beside": beside,
            "limits": {"bytes": images.MOST_BYTES, "pixels": images.MOST_PIXELS, "formats": list(images.FORMATS)},
        }

    @property
    def takes_images(self) -> bool:
        """Whether an image file can be prepared for the network: grey or colour, and square."""
        if self.originals.kind == "images":
            return True
        shape = self.trained.input_shape
        return len(shape) == 3 and shape[0] in (1, 3) and max(shape[1:]) <= self.trained.stored_size

    @property
    def takes_drawings(self) -> bool:
        """Whether the network takes what MNIST holds: one grey image of 28 x 28."""
        return self.trained.input_shape == (1, 28, 28)

    def examples(
        self,
        *,
        true: int | None = None,
        predicted: int | None = None,
        order: str = "closest",
        rival: int | None = None,
        page: int = 1,
    ) -> dict[str, Any]:
        """Return a page of the examples with these classes, in this order; a page past the end is the last one.

        "closest" is by the gap between the two most probable classes, "attention" by the rho of the class ``rival``,
        and "differ" shows where the second run answers otherwise.
        """
        chosen = np.ones(len(self.test), bool)
        for classes, wanted in ((self._labels, true), (self._predicted, predicted)):
            chosen &= True if wanted is None else classes == wanted
        if order == "differ" and self.beside is not None:
            chosen &= self._predicted != self.beside._predicted
            # First what the other run gets wrong and this one right, where the other is surest.
            keys = np.where(self._predicted == self._labels, -2.0, 0.0) - self.beside._confidence.numpy()
        elif order == "closest":
            keys = self._margin.numpy()
        elif order == "attention" and rival is not None:
            keys = -self._retain[:, rival].astype(np.float32)
        else:
            keys = self._truth.numpy() * (-1 if order == "easiest" else 1)
        rows = np.flatnonzero(chosen)
        rows = rows[np.argsort(keys[rows], kind="stable")]
        pages = max(1, math.ceil(len(rows) / PAGE))
        page = min(page, pages)
        return {
            "total": len(rows),
            "page": page,
            "pages": pages,
            "examples": [
                {
                    "index": row,
                    "true": int(self._labels[row]),
                    "predicted": int(self._predicted[row]),
                    "truth": _rounded(self._truth[row]),
                    **self._seen(row, TILE),
                    **({} if rival is None else {"attention": _rounded(self._retain[row, rival])}),
                }
                for row in rows[(page - 1) * PAGE : page * PAGE].tolist()
            ],
        }

    def example(self, index: int, *, noise: float = 0.0, seed: int = 0) -> dict[str, Any]:
        """Return the answer for one test example with noise of this standard deviation, and its true class."""
        inputs = self._noisy(self._input(index), [noise], seed)[0]
        truth = int(self._labels[index])
        answer = self.both(inputs, seed=seed, keep=truth)
        if not self.trained.is_images:
            answer |= self._seen(index, SEEN)
        return {"index": index, "true": truth, "noise": noise, **answer}

    @torch.inference_mode()
    def noise(self, index: int, *, seed: int = 0) -> dict[str, Any]:
        """Return how the answer for one example fades as the same noise grows louder.

        For each of ``NOISE_LEVELS``: the probability of what is the answer without noise, and the entropy.
        """
        found, _ = self._look(self._noisy(self._input(index), NOISE_LEVELS, seed))
        probs = found.probs
        answer = int(probs[0].argmax())
        return {
            "index": index,
            "answer": answer,
            "levels": list(NOISE_LEVELS),
            "probability": _rounded(probs[:, answer]),
            "entropy": _rounded(_entropy(probs)),
        }

    def both(self, inputs: Tensor, *, seed: int = 0, keep: int | None = None) -> dict[str, Any]:
        """Return :meth:`answer`, and where there is a second run its answer and probabilities under ``beside``."""
        found = self.answer(inputs, seed=seed, keep=keep)
        if self.beside is not None:
            other = self.beside.answer(inputs, seed=seed, keep=keep)
            shown = {row["class"]: row["p"] for row in other["rows"]}
            found["beside"] = {
                "predicted": other["predicted"],
                "probability": other["probability"],
                "rows": [shown.get(row["class"]) for row in found["rows"]],
            }
        return found

    @torch.inference_mode()
    def answer(self, inputs: Tensor, *, seed: int = 0, keep: int | None = None) -> dict[str, Any]:
        """Return what the model says about one raw input: uint8 (C, H, W), or features (D,).

        Up to 20 classes all get a row, in their order; of more, the twelve that matter, likeliest first, and the
        class ``keep``. A row has the probability ``p``, the retain probability ``rho``, and whether each sampled
        mask keeps the class. ``std`` is the standard deviation of the answer's probability over all masks.
        """
        found, all_logits = self._look(inputs[None])
        assert found.std is not None
        probs, std, retain, logits = found.probs[0], found.std[0], found.retain[0], all_logits[0]
        predicted, verdict = int(probs.argmax()), found.verdicts()[0]
        could_be = verdict.classes[:5]  # as many as the words name
        kept, masks = self._sampled_masks(logits, retain, seed)
        rows = _rows_that_matter(probs, retain, [k for k in (keep, *could_be) if k is not None])

        def about(k: int) -> dict[str, Any]:
            return {"class": k, "p": _rounded(probs[k]), "rho": _rounded(retain[k])}

        return {
            "predicted": predicted,
            "probability": _rounded(probs[predicted]),
            "std": _rounded(std[predicted]),
            "entropy": _rounded(_entropy(probs)),
            "state": verdict.state,
            "words": verdict.words(self.classes),
            "set": [about(k) for k in could_be],
            "rows": [{**about(k), "kept": [bool(mask[k]) for mask in kept]} for k in rows],
            "masks": masks,
            "image": images.png(inputs, SEEN) if self.trained.is_images else None,
        }

    @torch.inference_mode()
    def _look(self, inputs: Tensor) -> tuple[Outputs, Tensor]:
        """Return the answers with standard deviations over the masks, and the class logits, for raw inputs."""
        model = self.trained.model
        device = next(model.parameters()).device
        features = model.net(self.trained.prepare(inputs.to(device)))
        with self._damage_reported():
            found = answer(model.head, features, std=True)
        return Outputs.join([found]), model.head.classifier(features).float().cpu()

    @contextlib.contextmanager
    def _damage_reported(self) -> Iterator[None]:
        try:
            yield
        except NotFinite as error:
            what = "answers with numbers that are not finite, its weights are damaged"
            raise RunError(f"{self.name} {what} ({error})") from error

    def _sampled_masks(self, logits: Tensor, retain: Tensor, seed: int) -> tuple[Any, list[dict[str, Any]]]:
        """Return some masks, and how many classes each keeps and what is answered with it."""
        if not isinstance(self.trained.model.head, MaskedHead):
            return [], []
        kept, probs = sampled(logits, retain, MASKS, torch.Generator().manual_seed(seed))
        best = probs.max(-1)
        rows = zip(kept.sum(-1).tolist(), best.indices.tolist(), best.values, strict=True)
        return kept, [{"count": int(count), "class": k, "p": _rounded(p)} for count, k, p in rows]

    def map(self) -> dict[str, Any]:
        """Return how far the mean rho of each true class (rows) lies above its base rate, and the answers given.

        ``rho[i][j]`` is the mean rho of class j over the examples of class i, and ``above[i][j]`` how much that exceeds
        the mean over the examples of all classes but j. A class without test examples has a row of None. Of more than
        200 classes, those with most wrong answers given or received are shown.
        """
        count = len(self.classes)
        confusion = confusions(torch.from_numpy(self._labels), torch.from_numpy(self._predicted), count).numpy()
        shown = np.arange(count)
        if count > MAP_CLASSES:
            wrong = confusion - np.diag(confusion.diagonal())
            shown = np.sort(np.argsort(-(wrong.sum(0) + wrong.sum(1)), kind="stable")[:MAP_CLASSES])
        sums = np.stack([self._retain[self._labels == k].sum(0, dtype=np.float64) for k in range(count)])
        sizes = confusion.sum(1)
        base = (sums.sum(0) - sums.diagonal()) / np.maximum(1, sizes.sum() - sizes)
        rho, above = [], []
        for k in shown:
            mean = sums[k] / max(1, sizes[k])
            rho.append(np.round(mean[shown], 4).tolist() if sizes[k] else None)
            above.append(np.round((mean - base)[shown], 4).tolist() if sizes[k] else None)
        counts = confusion[np.ix_(shown, shown)].tolist()
        return {"classes": shown.tolist(), "rho": rho, "above": above, "counts": counts}

    @torch.inference_mode()
    def _measure(self) -> None:
        truth, predicted, retain, best = [], [], [], []
        with progress("looking at the test examples", len(self.test), "examples") as advance:
            for x, y in self.trained.batches(self.test, 250):
                with self._damage_reported():
                    found = predict(self.trained.model, [(x, y)])
                truth.append(found.probs.gather(-1, found.labels[:, None])[:, 0].float())
                predicted.append(found.predicted)
                best.append(found.probs.float().topk(2).values)
                retain.append(found.retain.half())  # half: a thousand classes fit too
                advance(len(y))
        self._labels = self.test.labels.numpy()
        self._truth = torch.cat(truth)
        self._predicted = torch.cat(predicted).numpy()
        self._confidence, second = torch.cat(best).unbind(-1)
        self._margin = self._confidence - second
        self._retain = torch.cat(retain).numpy()

    def _input(self, index: int) -> Tensor:
        inputs = self.test.inputs[index]
        return inputs if self.test.crop is None else centre_crop(inputs, self.test.crop, self.test.crop)

    def _noisy(self, inputs: Tensor, levels: list[float] | tuple[float, ...], seed: int) -> Tensor:
        """Return the input with Gaussian noise, once per level: in units of the whole range of pixels, or of std."""
        noise = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(seed))
        loudness = torch.tensor(levels).view(-1, *(1,) * inputs.ndim)
        if self.trained.is_images:
            return (inputs + loudness * 255 * noise).round().clamp(0, 255).to(torch.uint8)
        return inputs + loudness * torch.tensor(self.trained.std) * noise

    def _seen(self, index: int, side: int) -> dict[str, str | None]:
        """Return what to show of a test example: an image, or a sentence, or neither for plain features."""
        if self.trained.is_images:
            return {"image": images.png(self._input(index), side)}
        pixels, text = self.originals.picture(index, side), self.originals.text(index)
        return {
            "image": None if pixels is None else images.png(torch.from_numpy(pixels)),
            "text": None if text is None else shown_name(text, most=SENTENCE),
        }


def shown_name(name: str, number: int | None = None, *, most: int = 80) -> str:
    """Return a name that is safe to show: no control, bidirectional or lone surrogate characters, and not too long."""
    kept = "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in _HIDDEN else c for c in name[:most])
    if len(name) > most:
        kept = kept[:-1] + "…"
    return kept if kept.strip() else f"class {number}" if number is not None else "(no name)"


#: Control, format (these turn text around or hide it), surrogates, line and paragraph separators.
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def _masks_of(head: torch.nn.Module) -> str:
    if isinstance(head, MaskedHead):
        return "random"
    if isinstance(getattr(head, "retain", None), torch.nn.Module):
        return "gate"  # computed, never drawn
    return "training" if hasattr(head, "retain") else "none"


def _rows_that_matter(probs: Tensor, retain: Tensor, wanted: list[int]) -> list[int]:
    if len(probs) <= 20:
        return list(range(len(probs)))
    chosen = list(dict.fromkeys([*probs.topk(8).indices.tolist(), *wanted, *retain.topk(12).indices.tolist()]))[:12]
    chosen += [k for k in wanted if k not in chosen]
    return sorted(chosen, key=lambda k: -float(probs[k]))


def _entropy(probs: Tensor) -> Tensor:
    """Return the entropy of predictions as a share of its largest value, log K."""
    entropy: Tensor = torch.special.entr(probs).sum(-1) / math.log(probs.shape[-1])
    return entropy.clamp(0, 1)


def _rounded(values: Any) -> Any:
    found = values.tolist()
    return [round(v, 6) for v in found] if isinstance(found, list) else round(found, 6)
