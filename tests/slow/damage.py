"""Ways to damage a file: its bytes, its lines and words, or the tree of values it stands for."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

#: Where sizes and counts go wrong: nothing, one too many, signs, and the ends of 8, 16, 32 and 64 bits.
INTEGERS = (0, 1, 2, 127, 128, 255, 256, 32767, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
#: How files of other kinds begin.
MAGICS = (
    b"\x1f\x8b\x08\x00", b"PK\x03\x04", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"BM", b"II*\x00",
    b"PAR1", b"\x93NUMPY\x01\x00", b"\x80\x02}q\x00.", b"\x00\x00\x08\x03", b"{\"a\":", b"%!PS-Adobe", b"\x7fELF",
)  # fmt: skip
#: Words where a number, a name or a value is expected.
WORDS = (
    "", "nan", "inf", "-inf", "1e999", "-1", "0", "1_000", "0x10", "99999999999999999999999", "1.5", "true", "null",
    "[]", "{}", "..", "/etc/passwd", "../../x", "\x00", "\x1b[31m", "<script>", "\N{ARABIC-INDIC DIGIT FOUR}",
    "é\u202e", "\ufeff", "'", '"', "a" * 300, "9" * 5000,
)  # fmt: skip
#: Values in a tree of them.
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 10**9, 10**30, 10**400, 0.5, float("nan"), float("inf"), "", "x", "\x00", "../../x",
    "os:system", "a" * 2000, [], [[]], {}, {"name": {}}, [10**9], ["x"], [None], [float("nan")], "\ud800", "\x1b[2J",
)  # fmt: skip


def _times(rng: Random, most: int) -> range:
    return range(min(rng.choice((1, 1, 1, 1, 2, 4)), most))


def damage_bytes(rng: Random, data: bytes, most: int = 4) -> bytes:
    """Return the bytes with one thing, seldom up to ``most``, done to them."""
    for _ in _times(rng, most):
        a, b = sorted((_place(rng, data), _place(rng, data)))
        size, magic = rng.choice((1, 2, 4, 8)), rng.choice(MAGICS)
        number = (rng.choice(INTEGERS) % 256**size).to_bytes(size, rng.choice(("little", "big")))
        flipped = bytes(byte ^ 1 << rng.randrange(8) for byte in data[a : a + 1])
        data = rng.choice((
            *[data[:a] + flipped + data[a + 1 :], data[:a] + number + data[a + size :]] * 2,
            data[:a], data[b:], data[:a] + data[a + 100 * size :],
            data[: a + 64] + data[a : a + 64] * rng.choice((1, 50)) + data[a + 64 :],
            data[:a] + rng.choice((bytes(5000), rng.randbytes(16), b"\xff" * 9)) + data[a:],
            magic + data[len(magic) :], magic + data, data[b:] + data[a:b] + data[:a], rng.choice((b"", data + data)),
        ))  # fmt: skip
    return data


def _place(rng: Random, data: bytes) -> int:
    """Return a place in the data; headers are at the front and footers at the end, so half of the time there."""
    near = rng.randrange(min(len(data), 64) or 1)
    return max(0, rng.choice((near, len(data) - 1 - near, *[rng.randrange(len(data) or 1)] * 2)))


def damage_text(rng: Random, text: str, words: Sequence[str] = WORDS, most: int = 4) -> bytes:
    """Return the text as bytes, with words, lines or, now and then, bytes changed."""
    for _ in _times(rng, most):
        lines, word, place = text.split("\n"), rng.choice(words), rng.randrange(len(text) + 1)
        a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
        start, end = rng.choice([match.span() for match in re.finditer(r"[^\s,=\[\]{}\"]+", text)] or [(0, 0)])
        text = rng.choice((
            *[text[:start] + word + text[end:]] * 10, *[text[:place] + word + text[place:]] * 3,
            *["\n".join(lines[:a] + lines[a + 1 :]), "\n".join([*lines[:b], lines[a], *lines[b:]])] * 2,
            text + "\nx = " + nested(rng),
            rng.choice(("", "\n", text.replace("\n", "\r\n"), text.replace("\n", "\r"), "\ufeff" + text)),
        ))  # fmt: skip
    data = text.encode(rng.choice(("utf-8",) * 20 + ("utf-16", "latin-1")), errors="replace")
    return damage_bytes(rng, data) if rng.random() < 0.05 else data


def nested(rng: Random) -> str:
    """Return brackets in brackets, up to a hundred thousand."""
    depth = rng.choice((3, 30, 900, 2000, 100_000))
    return rng.choice(("[" * depth + "]" * depth, "[" * depth, '{"a":' * depth + "1" + "}" * depth))


def damage_tree(rng: Random, tree: Any) -> Any:
    """Return a tree of dictionaries, lists and values with some of them replaced, removed, renamed or doubled."""
    tree = copy.deepcopy(tree)
    for _ in _times(rng, 3):
        places = list(_places(tree))
        if not places:
            return rng.choice(ODD_VALUES)
        (holder, key), (other, there) = rng.choice(places), rng.choice(places)
        kind = rng.random()
        if kind < 0.6:
            holder[key] = copy.deepcopy(rng.choice(ODD_VALUES))
        elif kind < 0.75:
            del holder[key]
        elif kind < 0.85 and isinstance(holder, dict):
            holder[rng.choice(("x", "name", "", "a b", f"{key}x"))] = holder.pop(key)
        elif kind < 0.95:
            holder[key] = copy.deepcopy(other[there])
        elif isinstance(holder[key], (int, float)):
            holder[key] *= rng.choice((-1, 2, 1000))  # not 0.5: it may be 10**400
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (dictionary or list, key or index) of a tree."""
    if isinstance(tree, (dict, list)):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from _places(tree[key])
