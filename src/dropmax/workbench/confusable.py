"""The picture of a model card: which classes a model thinks of when it looks at another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from dropmax.workbench import style

__all__ = ["draw_confusable"]

_MOST_CLASSES = 30  # whose matrix can still be read
_PAIRS = 15


def draw_confusable(path: Path, attention: Tensor, classes: Sequence[str], meaning: str) -> None:
    """Draw the (K, K) matrix of attention of true class (row) to rival (column), or of many classes the top pairs.

    Args:
        path: where to, by suffix.
        attention: the mean over the examples of class i of what class j got; the diagonal and NaN are left out.
        classes: their names.
        meaning: what the numbers are, for the colour bar or axis.
    """
    plt = style.pyplot()
    names = [style.plain(name) for name in classes]
    rivals = attention.clone().fill_diagonal_(float("nan"))
    if len(names) <= _MOST_CLASSES:
        side = 2.2 + 0.3 * len(names)
        figure, axes = plt.subplots(figsize=(side + 1.0, side))
        image = axes.imshow(rivals.numpy(), cmap=style.MASKS)
        axes.set_facecolor("#DDDDDD")  # shows where there is no number: on the diagonal
        positions = range(len(names))
        axes.set_xticks(positions, names, rotation=0 if max(map(len, names)) <= 2 else 90)
        axes.set_yticks(positions, names)
        axes.set(xlabel="rival", ylabel="true class")
        axes.grid(False)
        figure.colorbar(image, ax=axes, label=meaning, shrink=0.8)
    else:
        pairs = top_pairs(rivals, _PAIRS)
        figure, axes = plt.subplots(figsize=(7, 0.6 + 0.3 * len(pairs)))
        labels = [f"{names[i]} → {names[j]}" for i, j, _ in pairs]
        axes.barh(range(len(pairs)), [value for *_, value in pairs], color=style.BLUE)
        axes.set_yticks(range(len(pairs)), labels)
        axes.invert_yaxis()
        axes.set(xlabel=meaning, title="true class → rival")
        axes.grid(False, axis="y")
    style.save(figure, path)


def top_pairs(attention: Tensor, count: int) -> list[tuple[int, int, float]]:
    """Return the pairs (true class, rival, value) of the largest values off the diagonal, largest first.

    >>> import torch
    >>> top_pairs(torch.tensor([[0.9, 0.2], [0.5, 0.8]]), 1)
    [(1, 0, 0.5)]
    """
    rivals = attention.clone().fill_diagonal_(float("nan")).nan_to_num(-1.0)
    values, places = rivals.flatten().topk(min(count, rivals.numel()))
    size = attention.shape[-1]
    return [(p // size, p % size, v) for p, v in zip(places.tolist(), values.tolist(), strict=True) if v >= 0]
