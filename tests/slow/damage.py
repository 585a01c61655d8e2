"""Ways to damage a file: its bytes, its lines and words, or the tree of values it stands for."""

from __future__ import annotations

import copy
import functools
import re
import zlib
from collections.abc import Sequence
from random import Random
from typing import Any

__all__ = ["INTEGERS", "WORDS", "damage_bytes", "damage_text", "damage_tree", "deflated", "nested"]

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


def damage_bytes(rng: Random, data: bytes, most: int = 4) -> bytes:
    """Return the bytes with one thing, seldom up to ``most``, done to them."""
    for _ in range(min(rng.choice((1, 1, 1, 1, 2, 4)), most)):
        data = rng.choice(_BYTES)(rng, data)
    return data


def _flip(rng: Random, data: bytes) -> bytes:
    if not data:
        return b"\x00"
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[_place(rng, data)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(rng: Random, data: bytes) -> bytes:
    return data[: _place(rng, data)] if rng.random() < 0.7 else data[_place(rng, data) :]


def _remove(rng: Random, data: bytes) -> bytes:
    start = _place(rng, data)
    return data[:start] + data[start + rng.choice((1, 2, 4, 64, 1000)) :]


def _repeat(rng: Random, data: bytes) -> bytes:
    start = _place(rng, data)
    part = data[start : start + rng.choice((1, 4, 64, 1000))]
    return data[:start] + part * rng.choice((2, 2, 50)) + data[start:]


def _write_integer(rng: Random, data: bytes) -> bytes:
    size = rng.choice((1, 2, 4, 8))
    value = (rng.choice(INTEGERS) & ((1 << 8 * size) - 1)).to_bytes(size, "little" if rng.random() < 0.5 else "big")
    start = _place(rng, data)
    return data[:start] + value + data[start + size :]


def _insert(rng: Random, data: bytes) -> bytes:
    start = _place(rng, data)
    return data[:start] + rng.choice((bytes(rng.choice((1, 100, 5000))), rng.randbytes(16), b"\xff" * 9)) + data[start:]


def _other_magic(rng: Random, data: bytes) -> bytes:
    magic: bytes = rng.choice(MAGICS)
    return magic + data[len(magic) :] if rng.random() < 0.5 else magic + data


def _swap(rng: Random, data: bytes) -> bytes:
    a, b = sorted((_place(rng, data), _place(rng, data)))
    return data[b:] + data[a:b] + data[:a] if rng.random() < 0.3 else data[:a] + data[b:] + data[a:b]


def _empty(rng: Random, data: bytes) -> bytes:
    return b"" if rng.random() < 0.2 else data + data


_BYTES = (
    _flip,
    _flip,
    _flip,
    _write_integer,
    _write_integer,
    _cut,
    _remove,
    _repeat,
    _insert,
    _other_magic,
    _swap,
    _empty,
)


def _place(rng: Random, data: bytes) -> int:
    """Headers are at the front and footers at the end: half of the time there."""
    if not data:
        return 0
    near = rng.random()
    if near < 0.3:
        return rng.randrange(min(len(data), 64))
    return len(data) - 1 - rng.randrange(min(len(data), 64)) if near < 0.5 else rng.randrange(len(data))


def damage_text(rng: Random, text: str, words: Sequence[str] = WORDS, most: int = 4) -> bytes:
    """Return the text as bytes, with words, lines or, now and then, bytes changed."""
    for _ in range(min(rng.choice((1, 1, 1, 1, 2, 4)), most)):
        kind = rng.random()
        lines = text.split("\n")
        line = rng.randrange(len(lines))
        if kind < 0.5:
            spans = [match.span() for match in re.finditer(r"[^\s,=\[\]{}\"]+", text)] or [(0, 0)]
            start, end = rng.choice(spans)
            text = text[:start] + rng.choice(words) + text[end:]
        elif kind < 0.6:
            del lines[line]
            text = "\n".join(lines)
        elif kind < 0.7:
            lines.insert(rng.randrange(len(lines) + 1), lines[line])
            text = "\n".join(lines)
        elif kind < 0.8:
            start = rng.randrange(len(text) + 1)
            text = text[:start] + rng.choice(words) + text[start:]
        elif kind < 0.85:
            other = rng.randrange(len(lines))
            lines[line], lines[other] = lines[other], lines[line]
            text = "\n".join(lines)
        elif kind < 0.9:
            text += "\nx = " + nested(rng)
        elif kind < 0.95:
            text = rng.choice(("", "\n", text.replace("\n", "\r\n"), text.replace("\n", "\r"), "\ufeff" + text))
        else:
            return damage_bytes(rng, text.encode(errors="replace"))
    return text.encode(rng.choice(("utf-8",) * 20 + ("utf-16", "latin-1")), errors="replace")


def nested(rng: Random) -> str:
    """Return brackets in brackets, up to a hundred thousand."""
    depth = rng.choice((3, 30, 900, 2000, 100_000))
    return rng.choice(("[" * depth + "]" * depth, "[" * depth, '{"a":' * depth + "1" + "}" * depth))


def damage_tree(rng: Random, tree: Any, most: int = 3) -> Any:
    """Return a tree of dictionaries, lists and values with some of them replaced, removed, renamed or doubled."""
    tree = copy.deepcopy(tree)
    for _ in range(min(rng.choice((1, 1, 1, 1, 2, 4)), most)):
        holders = list(_holders(tree))
        if not holders:
            return rng.choice(ODD_VALUES)
        holder, key = rng.choice(holders)
        kind = rng.random()
        if kind < 0.6:
            holder[key] = copy.deepcopy(rng.choice(ODD_VALUES))
        elif kind < 0.75:
            del holder[key]
        elif kind < 0.85 and isinstance(holder, dict):
            holder[rng.choice(("x", "name", "", "a b", str(key) + "x"))] = holder.pop(key)
        elif kind < 0.95:
            other, place = rng.choice(holders)
            if _is_there(other, place) and _is_there(holder, key):
                holder[key] = copy.deepcopy(other[place])
        elif isinstance(holder[key], (int, float)):
            holder[key] = rng.choice((-1, 2, 1000)) * holder[key]  # not 0.5: it may be 10**400
    return tree


def _holders(tree: Any) -> list[tuple[Any, Any]]:
    """Return every (dictionary or list, key or index) of a tree."""
    found: list[tuple[Any, Any]] = []
    if isinstance(tree, (dict, list)):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            found.append((tree, key))
            found += _holders(tree[key])
    return found


def _is_there(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


@functools.cache
def deflated(head: bytes, zeros: int) -> tuple[bytes, int, int]:
    """Return a deflate stream of ``head`` and zeros, its CRC-32 and its Adler-32, without packing each zero anew."""
    megabyte = bytes(1 << 20)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    start = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(megabyte) + packer.flush(zlib.Z_FULL_FLUSH)
    count, rest = divmod(zeros, len(megabyte))
    packed = start + block * count + packer.compress(bytes(rest)) + packer.flush()
    crc, adler = zlib.crc32(head), zlib.adler32(head)
    for _ in range(count):
        crc, adler = zlib.crc32(megabyte, crc), zlib.adler32(megabyte, adler)
    return packed, zlib.crc32(bytes(rest), crc), zlib.adler32(bytes(rest), adler)
