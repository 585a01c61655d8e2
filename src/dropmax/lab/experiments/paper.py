"""What the paper's Table 1 says: test error in percent, mean and 95 % interval over five runs."""

from __future__ import annotations

__all__ = ["COLUMNS", "PAPER", "ROWS", "WHY_NOT"]

#: The columns of the table by data set, in its order. AWA is the first release; numbers on AWA2 go elsewhere.
COLUMNS = {
    "mnist-1k": "MNIST-1K",
    "mnist-5k": "MNIST-5K",
    "mnist-55k": "MNIST-55K",
    "cifar-10": "CIFAR-10",
    "cifar-100": "CIFAR-100",
    "awa": "AWA",
    "cub": "CUB",
}

#: The rows by head, as the paper calls them.
ROWS = {
    "softmax": "Base Softmax",
    "sparsemax": "Sparsemax",
    "sampled-softmax": "Sampled Softmax",
    "random-dropmax": "Random DropMax",
    "deterministic-attention": "Deterministic Attention",
    "deterministic-dropmax": "Deterministic DropMax",
    "dropmax-qp": "DropMax (q=p)",
    "dropmax": "DropMax",
}

#: Why a column that was not asked for has no numbers, where "not run" would not say enough.
WHY_NOT = {
    "cifar-10": "needs a GPU-week",
    "cifar-100": "needs a GPU-week",
    "awa": "images no longer distributed",
    "cub": "needs a GPU-week",
}

_NUMBERS = {
    "softmax": "7.09 0.46  2.13 0.21  0.65 0.04  7.90 0.21  30.60 0.12  30.29 0.80  48.84 0.85",
    "sparsemax": "6.57 0.17  2.05 0.18  0.75 0.06  7.90 0.28  31.41 0.16  36.06 0.64  64.41 1.12",
    "sampled-softmax": "7.36 0.22  2.31 0.14  0.66 0.04  7.98 0.24  30.87 0.19  29.81 0.45  49.90 0.56",
    "random-dropmax": "7.19 0.57  2.23 0.19  0.68 0.07  8.21 0.08  30.78 0.28  31.11 0.54  48.87 0.79",
    "deterministic-attention": "6.91 0.46  2.03 0.11  0.69 0.05  7.87 0.24  30.60 0.21  30.98 0.66  49.97 0.32",
    "deterministic-dropmax": "6.30 0.64  1.89 0.04  0.64 0.05  7.84 0.14  30.55 0.51  26.22 0.76  47.35 0.42",
    "dropmax-qp": "7.52 0.26  2.05 0.07  0.63 0.02  7.80 0.22  29.98 0.35  29.27 1.19  42.08 0.94",
    "dropmax": "5.32 0.09  1.64 0.08  0.59 0.04  7.67 0.11  29.87 0.36  26.91 0.54  41.07 0.57",
}


def _pairs(text: str) -> list[tuple[float, float]]:
    numbers = [float(word) for word in text.split()]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


#: ``PAPER[head][data]`` is the paper's (mean, half-width) in percent.
PAPER: dict[str, dict[str, tuple[float, float]]] = {
    head: dict(zip(COLUMNS, _pairs(text), strict=True)) for head, text in _NUMBERS.items()
}
