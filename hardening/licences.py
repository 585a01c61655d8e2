"""Licences of installed distributions as SPDX expressions, and which of them a permissive project may depend on."""

from __future__ import annotations

import re
from importlib.metadata import Distribution

#: Ask for no more than a notice.
# fmt: off
PERMISSIVE = {
    "MIT", "MIT-0", "MIT-CMU", "HPND", "ISC", "0BSD", "BSD-2-Clause", "BSD-3-Clause", "LicenseRef-BSD", "Apache-2.0",
    "PSF-2.0", "Python-2.0", "CNRI-Python", "Zlib", "CC0-1.0", "BSL-1.0", "Unlicense", "LLVM-exception",
}
# fmt: on
#: Ask for the source of changed files of theirs, and nothing of ours.
FILE_COPYLEFT = {"MPL-2.0"}

#: How older metadata says it; "BSD" without a number of clauses stays what it is.
_WORDS = [
    (r"apache( software)?( license)?,?( version)? ?-?2(\.0)?( license)?|apache( software license)?", "Apache-2.0"),
    (r"(the )?mit( license)?", "MIT"),
    (r"(3-clause bsd|bsd[- ]3[- ]clause|new bsd|modified bsd)( license)?", "BSD-3-Clause"),
    (r"(2-clause bsd|bsd[- ]2[- ]clause|simplified bsd)( license)?", "BSD-2-Clause"),
    (r"bsd( license)?", "LicenseRef-BSD"),
    (r"isc( license)?( \(iscl\))?", "ISC"),
    (r"mozilla public license 2\.0 \(mpl 2\.0\)|mpl[- ]2\.0", "MPL-2.0"),
    (r"python software foundation license|psf-2\.0", "PSF-2.0"),
    (r"gnu (?:affero |lesser |library or lesser )?general public license.*|.?gpl.*", "GPL-3.0-or-later"),
]
#: Files beside the code that hold the licence's text.
_NAME = re.compile(r"^(licen[cs]e|copying)[^/]*$", re.IGNORECASE)


def licence_of(distribution: Distribution) -> str:
    """Return the licence as an SPDX expression, "" where nothing that is understood is said.

    The field made for it comes first, then the old free text, then the classifiers; which BSD licence it is, its text
    tells.
    """
    about = distribution.metadata
    for expression in about.get_all("License-Expression") or []:
        return str(expression)
    free = str((about.get_all("License") or [""])[0])
    if re.fullmatch(r"[\w.-]+( (AND|OR) [\w.-]+)+", free):
        return free
    classifiers = [line.rpartition(" :: ")[2] for line in about.get_all("Classifier") or [] if "License ::" in line]
    found = _spdx(free) or " AND ".join(filter(None, dict.fromkeys(map(_spdx, classifiers))))
    if found not in ("", "LicenseRef-BSD"):
        return found
    texts = [free, *(file.read_text() or "" for file in distribution.files or [] if _NAME.search(file.name))]
    return _clauses("\n".join(texts)) or found


def verdict(expression: str) -> str:
    """Return "permissive", "file copyleft", "refused", or "unknown" for an SPDX expression.

    Of alternatives the best counts, of what applies together the worst.

    >>> verdict("MIT OR GPL-3.0-only"), verdict("MIT AND MPL-2.0"), verdict("GPL-3.0-only AND MIT"), verdict("")
    ('permissive', 'file copyleft', 'refused', 'unknown')
    """
    if not expression.strip():
        return "unknown"
    words = re.findall(r"[()]|[^\s()]+", expression)
    order = ["permissive", "file copyleft", "refused"]
    value, rest = _either(words)
    return "unknown" if rest or value is None else order[value]


def _either(words: list[str]) -> tuple[int | None, list[str]]:
    value, words = _both(words)
    while words and words[0].upper() == "OR":
        other, words = _both(words[1:])
        value = None if value is None or other is None else min(value, other)
    return value, words


def _both(words: list[str]) -> tuple[int | None, list[str]]:
    value, words = _one(words)
    while words and words[0].upper() in ("AND", "WITH"):
        other, words = _one(words[1:])
        value = None if value is None or other is None else max(value, other)
    return value, words


def _one(words: list[str]) -> tuple[int | None, list[str]]:
    if not words:
        return None, []
    if words[0] == "(":
        value, rest = _either(words[1:])
        return (value, rest[1:]) if rest[:1] == [")"] else (None, rest)
    return (0 if words[0] in PERMISSIVE else 1 if words[0] in FILE_COPYLEFT else 2), words[1:]


def _spdx(words: str) -> str:
    for pattern, name in _WORDS:
        if re.fullmatch(pattern, words.strip(), re.IGNORECASE):
            return name
    return ""


def _clauses(text: str) -> str:
    """Tell the BSD licences apart by their text."""
    if "redistributions of source code" not in text.lower():
        return ""
    return (
        "BSD-3-Clause" if re.search(r"neither the names? |may not be used to endorse", text, re.I) else "BSD-2-Clause"
    )
