"""Checks of what callers pass in, with messages that quote it.

Shapes and dtypes cost nothing to look at. Values do: reading one from an accelerator stalls it, and a traced or
vmapped tensor has none. So values are checked on the CPU only; elsewhere the device's own bounds checks remain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from dropmax.errors import InvalidType, InvalidValue
from dropmax.errors import check_choice as check_choice  # beside the other checks


class NotFinite(InvalidValue, FloatingPointError):
    """NaN or infinity came in, or finite numbers were too large for the dtype."""


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def values_are_readable(x: Tensor) -> bool:
    """Say whether looking at values of ``x`` is free: on the CPU, and neither compiled nor transformed."""
    return x.device.type == "cpu" and not is_traced(x) and not isinstance(x, FakeTensor)


def is_traced(x: Tensor) -> bool:
    """Say whether ``x`` stands for a tensor: inside ``torch.compile``, ``torch.export``, or a torch.func transform."""
    return torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_transformed(*tensors: Tensor) -> bool:
    """Say whether any is inside a torch.func transform or ``torch.export``, where only plain operations will do."""
    if torch.compiler.is_compiling():  # a compiler cannot trace the question below
        return is_exporting()
    return any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


def is_exporting() -> bool:
    """Say whether ``torch.export`` is tracing: its graph must hold plain operations, not ours."""
    return torch.compiler.is_exporting()


def check_finite(what: str, x: Tensor, advice: str, also: Sequence[float] = ()) -> Tensor:
    """Return ``x``, or refuse it where looking is free and shows a number neither finite nor in ``also``."""
    if not values_are_readable(x):
        return x
    values = x.detach()
    # A sum is quick, and finite only if everything in it is. Where it is not, it may itself have overflowed.
    if not math.isfinite(values.sum()):
        wrong = ~values.isfinite()
        for allowed in also:
            wrong &= values != allowed
        if bool(wrong.any()):
            where = wrong.nonzero()[0].tolist()
            value = values[tuple(where)].item()
            raise NotFinite(f"{what} hold {value} at {where} (shape {tuple(x.shape)}, {x.dtype}): {advice}")
    return x


def check_features(features: Tensor, in_features: int) -> None:
    """Refuse features whose last dimension is not ``in_features``, or that are not finite floating-point numbers."""
    if not isinstance(features, Tensor):
        raise InvalidType(f"features must be a torch.Tensor, got {type(features).__name__}")
    if not features.is_floating_point():
        raise InvalidType(f"features must be floating point, got {features.dtype}: call .float() on them first")
    if features.dim() == 0 or features.shape[-1] != in_features:
        raise InvalidValue(
            f"features have shape {tuple(features.shape)}, but this head expects {in_features} values in the last "
            f"dimension (in_features={in_features})"
        )
    check_finite("features", features, "look for missing values in the data, or for a network that has diverged")


def check_target(
    target: Tensor, batch_shape: Sequence[int], num_classes: int, ignore_index: int | None = None
) -> Tensor:
    """Return the class indices as int64, or refuse them: wrong dtype, shape, or a label out of range."""
    if not isinstance(target, Tensor):
        raise InvalidType(f"target must be a torch.Tensor of class indices, got {type(target).__name__}")
    if target.dtype not in _INTEGERS:
        raise InvalidType(
            f"target must hold integer class indices, or floating-point soft labels with one probability per class, "
            f"got {target.dtype}"
        )
    if tuple(target.shape) != tuple(batch_shape):
        raise InvalidValue(
            f"target has shape {tuple(target.shape)}, but the batch needs one label per row, shape {tuple(batch_shape)}"
        )
    if values_are_readable(target) and target.numel():
        lowest, highest = target.aminmax()
        if lowest < 0 or highest >= num_classes:
            wrong = (target < 0) | (target >= num_classes)
            if ignore_index is not None:
                wrong &= target != ignore_index
            for label in target[wrong].tolist():
                raise InvalidValue(
                    f"target holds the label {label}, but labels must lie in 0..{num_classes - 1} "
                    f"(num_classes={num_classes})"
                    + (f" or equal ignore_index={ignore_index}" if ignore_index is not None else "")
                )
    return target.long()


def check_soft_target(target: Tensor, batch_shape: Sequence[int], num_classes: int) -> Tensor:
    """Return soft labels ``(N, K)``, or refuse them: wrong shape, or rows that are not probabilities."""
    if tuple(target.shape) != (*batch_shape, num_classes):
        raise InvalidValue(
            f"soft labels must have one probability per row and class, shape {(*batch_shape, num_classes)}, got "
            f"{tuple(target.shape)}; hard labels are integers of shape {tuple(batch_shape)}"
        )
    target = target.reshape(-1, num_classes)
    if values_are_readable(target) and target.numel():
        off = ~((target >= 0).all(-1) & ((target.sum(-1) - 1).abs() < 0.01))
        if off.any():
            row = target[off][0]
            raise InvalidValue(
                f"soft labels must be probabilities that sum to 1 in each row, got a row with smallest value "
                f"{float(row.min()):g} and sum {float(row.sum()):g}"
            )
    return target


def check_positive(option: str, value: float) -> None:
    """Refuse a number that is not finite and above zero."""
    _check_number(option, value)
    if not (math.isfinite(value) and value > 0):
        raise InvalidValue(f"{option} must be a finite number above 0, got {value!r}")


def check_weight(option: str, value: float) -> None:
    """Refuse a weight that is negative or not finite."""
    _check_number(option, value)
    if not (math.isfinite(value) and value >= 0):
        raise InvalidValue(f"{option} must be finite and not negative, got {value!r}")


def check_probability(option: str, value: float, *, zero: bool = False, one: bool = False) -> None:
    """Refuse a number outside (0, 1), or outside [0, 1) / (0, 1] where ``zero`` / ``one`` are allowed."""
    _check_number(option, value)
    if not (0 < value < 1 or (zero and value == 0) or (one and value == 1)):
        interval = f"{'[' if zero else '('}0, 1{']' if one else ')'}"
        raise InvalidValue(f"{option} must lie in {interval}, got {value!r}")


def check_count(option: str, value: int, least: int = 1) -> None:
    """Refuse anything but a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidType(f"{option} must be a whole number, got {value!r}")
    if value < least:
        raise InvalidValue(f"{option} must be at least {least}, got {value}")


def check_flag(option: str, value: bool) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, bool):
        raise InvalidType(f"{option} must be True or False, got {value!r}")


def _check_number(option: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise InvalidType(f"{option} must be a number, got {value!r}")


def check_class_weight(
    weight: Tensor | Sequence[float] | None, num_classes: int, device: torch.device | str | None
) -> Tensor | None:
    """Return one weight per class as a tensor; refuse another number of them, and negative or infinite ones."""
    if weight is None:
        return None
    try:
        result = torch.as_tensor(weight, dtype=torch.float32, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidType(f"class_weight must hold one number per class, got {weight!r}") from error
    if tuple(result.shape) != (num_classes,):
        raise InvalidValue(
            f"class_weight must hold one number for each of the {num_classes} classes, got shape {tuple(result.shape)}"
        )
    if not bool(torch.isfinite(result).all() and (result >= 0).all()):
        raise InvalidValue(f"class_weight must be finite and not negative, got {result.tolist()}")
    return result


def check_probs(probs: Tensor) -> Tensor:
    """Return probabilities (N, K) in float64 on the CPU; refuse rows that are empty, not finite or do not sum to 1."""
    if not isinstance(probs, Tensor):
        raise InvalidType(f"probs must be a torch.Tensor, got {type(probs).__name__}: use torch.as_tensor")
    if not probs.is_floating_point():
        raise InvalidType(f"probs must hold floating-point probabilities, got {probs.dtype}")
    if probs.ndim != 2:
        raise InvalidValue(f"probs must have shape (N, K), got {tuple(probs.shape)}")
    if probs.numel() == 0:
        raise InvalidValue(f"there is nothing to measure: probs has shape {tuple(probs.shape)}")
    # 16-bit probabilities are rounded to 2 or 3 digits each, so their rows sum to one only as well as that.
    tolerance = 1e-2 if probs.dtype.itemsize < 4 else 1e-4
    probs = probs.detach().cpu().double()
    for bad, what in ((~probs.isfinite(), "is not finite"), (probs < 0, "is negative")):
        if bad.any():
            row, column = (int(i) for i in bad.nonzero()[0])
            hint = ": are these logits? Take their softmax first" if what == "is negative" else ""
            raise InvalidValue(f"probs[{row}, {column}] = {float(probs[row, column]):g} {what}{hint}")
    off = (probs.sum(1) - 1).abs() > tolerance
    if off.any():
        row = int(off.nonzero()[0])
        raise InvalidValue(f"row {row} of probs sums to {float(probs[row].sum()):g}, not 1: take a softmax first")
    return probs


def check_labels(target: Tensor, rows: int, num_classes: int) -> Tensor:
    """Return one class index per row as int64 on the CPU, or refuse the labels: wrong dtype, shape or range."""
    if not isinstance(target, Tensor):
        raise InvalidType(f"target must be a torch.Tensor, got {type(target).__name__}: use torch.as_tensor")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise InvalidType(f"target must hold integer class labels, got {target.dtype}")
    if tuple(target.shape) != (rows,):
        raise InvalidValue(f"target must hold one label for each of the {rows} rows, got shape {tuple(target.shape)}")
    target = target.detach().cpu().long()
    outside = (target < 0) | (target >= num_classes)
    if outside.any():
        row = int(outside.nonzero()[0])
        raise InvalidValue(
            f"target[{row}] = {int(target[row])} is not a class: with {num_classes} classes labels are "
            f"0 to {num_classes - 1}"
        )
    return target
