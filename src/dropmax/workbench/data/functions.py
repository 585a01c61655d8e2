"""Data that a function of your own returns, named ``package.module:function``.

The function takes no arguments and returns ``(inputs, labels)``, or a dictionary with ``train`` and, as far as there
are any, ``validation`` and ``test``, each ``(inputs, labels)``, and ``classes``, their names. Inputs are arrays of
shape (n, features) or images (n, channels, height, width) of uint8; labels are integers from 0.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np

from dropmax.errors import DataError, InvalidValue
from dropmax.imports import load_module
from dropmax.workbench.data.npz import check_inputs
from dropmax.workbench.data.splits import Part, Parts

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_EXPECTED = "the function must return (inputs, labels), or a dictionary of such pairs with train, validation, test"


def is_function(name: str) -> bool:
    """Say whether a name of data is that of a function.

    >>> is_function("mine.data:birds"), is_function("birds.csv"), is_function("C:birds")
    (True, False, True)
    """
    return _NAME.fullmatch(name) is not None


def import_data(name: str) -> None:
    """Import the module of such a function, which runs it: only names from people you trust should come here."""
    load_module("data", name)


def read_function(name: str) -> Parts:
    """Call a function whose module is imported already, and check what it returns."""
    module_name, _, function_name = name.partition(":")
    module = sys.modules.get(module_name)
    if module is None:
        raise DataError(
            f"the data {name!r} is what a function returns, and its module is not imported: import {module_name} first "
            "if you trust it (dropmax reproduce does, for data you name yourself or with --trust-code)"
        )
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InvalidValue(f"data {name!r}: {module_name} has no function {function_name!r}")
    try:
        found = function()
    except Exception as error:
        last = (str(error).splitlines() or [""])[-1]
        raise DataError(f"data {name!r}: the function failed ({type(error).__name__}: {last})") from error
    try:
        return _check(found)
    except DataError as error:
        raise DataError(f"data {name!r}: {error}") from None


def _check(found: Any) -> Parts:
    pairs = dict(found) if isinstance(found, dict) else {"train": found}
    if "train" not in pairs or set(pairs) - {"train", "validation", "test", "classes"}:
        raise DataError(f"{_EXPECTED}, got a dictionary with {', '.join(map(repr, pairs)) or 'nothing'}")
    given = pairs.pop("classes", None)
    parts = {key: _part(key, pair) for key, pair in pairs.items() if pair is not None or key == "train"}
    shape = parts["train"].inputs.shape[1:]
    for key, part in parts.items():
        if part.inputs.shape[1:] != shape:
            raise DataError(f"inputs of {key} have shape {part.inputs.shape[1:]}, of train {shape}")
    count = 1 + max(int(part.labels.max()) for part in parts.values())
    classes = tuple(map(str, given or range(count)))
    if len(classes) < count:
        raise DataError(f"it names {len(classes)} classes, and has labels up to {count - 1}")
    return Parts(parts["train"], classes, parts.get("validation"), parts.get("test"))


def _part(key: str, pair: Any) -> Part:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise DataError(f"{_EXPECTED}; {key} is a {type(pair).__name__}")
    inputs, labels = (np.asarray(value) for value in pair)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not len(labels) or int(labels.min()) < 0:
        raise DataError(f"the labels of {key} must be integers from 0, one per row")
    if inputs.ndim not in (2, 4) or len(inputs) != len(labels):
        raise DataError(
            f"the inputs of {key} must be numbers of shape (n, features), or images of shape (n, channels, height, "
            f"width), one row per label; got {inputs.dtype} of shape {inputs.shape} for {len(labels)} labels"
        )
    return Part(check_inputs("its result", f"inputs of {key}", inputs), labels.astype(np.int64))
