"""Heads by name: those of dropmax, those of installed packages, those you register, and any class you can import."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata
from typing import Any, TypeVar, overload

from dropmax.errors import InvalidType, InvalidValue, unknown
from dropmax.heads.ablations import DropMaxRelaxed, DropMaxSoftmaxRetain, DropMaxUnmasked
from dropmax.heads.base import Head
from dropmax.heads.deterministic import DeterministicAttention, DeterministicDropMax
from dropmax.heads.dropmax import DropMax
from dropmax.heads.dropmax_qp import DropMaxQP
from dropmax.heads.focal import Focal
from dropmax.heads.label_posterior import DropMaxLabelPosterior
from dropmax.heads.online_label_smoothing import OnlineLabelSmoothing
from dropmax.heads.options import option_names, unknown_option
from dropmax.heads.random_dropmax import RandomDropMax
from dropmax.heads.sampled_softmax import SampledSoftmax
from dropmax.heads.sigsoftmax import SigSoftmax
from dropmax.heads.softmax import Softmax
from dropmax.heads.sparsemax import Sparsemax
from dropmax.heads.theta_prior import DropMaxThetaPrior
from dropmax.imports import import_class, import_name, locate

__all__ = ["ABLATIONS", "FURTHER", "HEADS", "find_head", "findable_name", "make_head", "register_head"]

#: Packages announce heads in this group of entry points: ``focal = "mine.heads:Focal"``.
ENTRY_POINTS = "dropmax.heads"

#: The paper's heads by name, in the order of its Table 1, and behind them those that are registered.
HEADS: dict[str, type[Head]] = {
    head.name: head
    for head in (
        Softmax,
        Sparsemax,
        SampledSoftmax,
        RandomDropMax,
        DeterministicAttention,
        DeterministicDropMax,
        DropMaxQP,
        DropMax,
    )
}

#: Further baselines, by name: rows of a table when asked for.
FURTHER: dict[str, type[Head]] = {head.name: head for head in (Focal, SigSoftmax, OnlineLabelSmoothing)}

#: Heads for ablations, by name: :func:`make_head` makes them too, but they are not rows of the table.
ABLATIONS: dict[str, type[Head]] = {
    head.name: head
    for head in (DropMaxUnmasked, DropMaxSoftmaxRetain, DropMaxRelaxed, DropMaxThetaPrior, DropMaxLabelPosterior)
}

_Class = TypeVar("_Class", bound=type[Head])


@overload
def register_head(head: _Class) -> _Class: ...


@overload
def register_head(head: None = None) -> Any: ...


def register_head(head: _Class | None = None) -> Any:
    """Make a head of your own known by its name, everywhere: a decorator for the class.

    Runs, studies and models that name it remember where to import it, so that another process finds it too. A
    package's heads need not be registered: they are found by their entry points (docs/write-a-head.md).

    >>> @register_head
    ... class Plain(Head):
    ...     name = "plain"
    ...
    ...     def terms(self, logits, target, noise):
    ...         return {"cross_entropy": self.cross_entropy(logits["classifier"], target)}
    >>> make_head("plain", in_features=4, num_classes=3)
    Plain(in_features=4, num_classes=3)
    >>> del HEADS["plain"]
    """
    if head is None:  # @register_head()
        return register_head
    head = _checked(head)
    for heads in (HEADS, FURTHER, ABLATIONS):
        known = heads.get(head.name)
        if known is not None and _place(known) != _place(head):  # a class may be defined again, in a notebook
            raise InvalidValue(
                f"two heads are called {head.name!r}: {_place(known)} and {_place(head)}; give yours another name"
            )
    HEADS[head.name] = head
    return head


def find_head(head: str | type[Head]) -> type[Head]:
    """Return the head with this name, or the class itself.

    A name is a key of :data:`HEADS`, :data:`FURTHER` or :data:`ABLATIONS`, an entry point of an installed package, or
    ``package.module:Class`` or ``path/to/file.py:Class``, which is imported: take such names from people you trust.

    >>> find_head("focal").__name__, find_head("dropmax.heads:Softmax").__name__
    ('Focal', 'Softmax')
    """
    if not isinstance(head, str):
        return _checked(head)
    if ":" in head:
        return _checked(import_class("head", head, Head))
    for heads in (HEADS, FURTHER, ABLATIONS):
        if head in heads:
            return heads[head]
    announced = [each for each in metadata.entry_points(group=ENTRY_POINTS) if each.name == head]
    places = {each.value: getattr(each.dist, "name", None) for each in announced}
    if len(places) > 1:
        which = " and ".join(f"{place} (of {package})" for place, package in sorted(places.items()))
        raise InvalidValue(f"two installed packages call a head {head!r}: {which}; name one of them in full")
    if places:
        return _checked(import_class("head", next(iter(places)), Head))
    names = dict.fromkeys([*HEADS, *FURTHER, *(each.name for each in metadata.entry_points(group=ENTRY_POINTS))])
    raise InvalidValue(unknown("head", head, names, "your own is package.module:Class or ./file.py:Class"))


def findable_name(name: str) -> str:
    """Return the name by which another process finds a head: where to import it, if it is only registered here.

    >>> findable_name("softmax"), findable_name("mine.heads:Focal")
    ('softmax', 'mine.heads:Focal')
    """
    if ":" in name:
        return locate(name)
    head = HEADS.get(name)
    if head is None or head.__module__.partition(".")[0] == "dropmax":
        return name
    return import_name(head) or name


def make_head(name: str | type[Head], in_features: int, num_classes: int, **options: Any) -> Head:
    """Make a head by its name (:func:`find_head`).

    >>> make_head("dropmax", in_features=512, num_classes=100, temperature=0.5)
    DropMax(in_features=512, num_classes=100, temperature=0.5)
    """
    head = find_head(name)
    check_options(head, options)
    return head(in_features, num_classes, **options)


def check_options(head: type[Head], options: Iterable[str]) -> None:
    """Raise for the first name that is no option of the head."""
    for option in options:
        if option not in (*option_names(head), "device", "dtype"):
            raise InvalidType(unknown_option(head, option))


def _checked(head: _Class) -> _Class:
    """Refuse what is not a head, and names that cannot name a directory."""
    if not (isinstance(head, type) and issubclass(head, Head)) or head is Head:
        got = "dropmax.Head itself" if head is Head else repr(head)
        raise InvalidType(f"a head is a name such as 'dropmax' or a class deriving from dropmax.Head, got {got}")
    if not isinstance(head.name, str) or not re.fullmatch(r"[\w.+-]+", head.name):
        raise InvalidValue(f"{_place(head)} is called {head.name!r}: a name has letters, digits and . + - _ only")
    return head


def _place(head: type[Head]) -> str:
    return f"{head.__module__}:{head.__qualname__}"
