"""The paper's equation numbers: counted from its LaTeX, and right wherever we print one.

``paper_equations.json`` holds the numbers, labels and names, so that most of these tests run without the LaTeX, which
is not part of the repository. Where ``../shared/paper/dropmax.tex`` is there, the table is checked against it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LATEX = ROOT.parent / "shared" / "paper" / "dropmax.tex"
EQUATIONS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "paper_equations.json").read_text("utf-8"))
#: "equation 5", "eq. 5", "eqs. 14 and 15", "equations 4 to 13", "equations 2, 3 and 5".
MENTION = re.compile(r"\b(?:eqs?\.|equations?) (\d+(?:(?:, | and | to )\d+)*)", re.IGNORECASE)


def numbered(latex: str) -> list[str | None]:
    r"""Return the label, or None, of each numbered equation of a LaTeX document, in order.

    ``equation`` has one number; ``align`` has one per row. ``\nonumber`` takes the number of its ``equation`` away, or
    that of its row of an ``align``.
    """
    body = re.sub(r"(?<!\\)%.*", "", latex)
    labels: list[str | None] = []
    for name, content in re.findall(r"\\begin\{(equation|align)\}(.*?)\\end\{\1\}", body, re.DOTALL):
        rows = [content] if name == "equation" else re.split(r"\\\\(?!\w)", content)
        for row in rows:
            if row.strip() and r"\nonumber" not in row:
                label = re.search(r"\\label\{([^}]*)\}", row)
                labels.append(label[1] if label else None)
    return labels


def test_equations_are_counted_as_latex_does() -> None:
    latex = r"""
        \begin{align} a \label{a} \\ b \nonumber \\ c \label{c} \end{align}
        % \begin{equation} no \end{equation}
        \begin{equation}\begin{aligned} d \nonumber \\ e \nonumber \end{aligned}\end{equation}
        \begin{equation}\begin{aligned} f \\ g \label{g} \end{aligned}\end{equation}
        \begin{align*} h \end{align*} \begin{align} i \end{align}
    """
    assert numbered(latex) == ["a", "c", "g", None]


@pytest.mark.skipif(not LATEX.exists(), reason="the paper's LaTeX is not here")
def test_the_table_of_equations_is_that_of_the_latex() -> None:
    assert [e["label"] for e in EQUATIONS] == numbered(LATEX.read_text(encoding="utf-8"))


def test_the_table_of_equations_counts_from_one() -> None:
    assert [e["number"] for e in EQUATIONS] == list(range(1, len(EQUATIONS) + 1))


def test_the_equations_that_have_been_misnumbered_have_their_numbers() -> None:
    numbers = {e["label"]: e["number"] for e in EQUATIONS}
    assert [numbers[f"eq:{x}"] for x in ("q", "rloss", "approx_post", "entropy", "test_ensemble", "test_approx")] == [
        10, 11, 12, 13, 14, 15
    ]  # fmt: skip


def mentions() -> list[tuple[str, list[int], str]]:
    """Return where an equation is named by number, the numbers, and the text around it."""
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    found = []
    for path in files:
        if path == ROOT / "docs" / "paper.md":  # it names all of them, and has tests of its own
            continue
        text = path.read_text(encoding="utf-8")
        for match in MENTION.finditer(text):
            line = text[: match.start()].count("\n") + 1
            numbers = [int(n) for n in re.findall(r"\d+", match[1])]
            around = text[max(0, match.start() - 120) : match.end() + 120]
            found.append((f"{path.relative_to(ROOT)}:{line}", numbers, " ".join(around.split())))
    return found


def test_every_equation_named_by_number_is_about_what_the_text_around_it_says() -> None:
    table = {e["number"]: e for e in EQUATIONS}
    found = mentions()
    assert len(found) > 15, "the pattern no longer finds the mentions"
    for where, numbers, around in found:
        for number in numbers:
            assert number in table, f"{where}: the paper has no equation {number}"
            name, words = table[number]["name"], table[number]["words"]
            assert any(word in around for word in words), (
                f"{where}: equation {number} is {name}, the text says: {around}"
            )
