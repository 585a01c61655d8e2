"""The paper's equation numbers are right wherever we print one, and docs/paper.md accounts for all of the paper."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: The equations of the paper, in order from 1: their names, and words of which one is near where they are mentioned.
EQUATIONS: list[tuple[str, tuple[str, ...]]] = [
    ("class logits", ("class logits",)),
    ("softmax", ("softmax",)),
    ("softmax with fixed retain probabilities", ("mask z", "one rho for all",)),
    ("retain probabilities", ("retain prob", "W_theta h", "retain logits", "adaptive variational",)),
    ("DropMax likelihood", ("p(y | x, z)", "p(y given x, z)", "log(z + ",)),
    ("relaxed mask", ("relaxed", "tau",)),
    ("true posterior", ("true posterior",)),
    ("evidence lower bound", ("lower bound", "ELBO",)),
    ("factors of the true posterior", ("factor",)),
    ("g", ("g = ", "g(x)", "correction",)),
    ("auxiliary loss", ("auxiliary",)),
    ("approximate posterior q", ("q(z", "posterior",)),
    ("entropy of p(z | x)", ("entropy", "H = ", "KL[", "adaptive variational",)),
    ("Monte Carlo prediction", ("drawn from p(z", "Monte Carlo", "average over masks",)),
    ("mean prediction", ("mean prediction", "in place of the masks", "ρ in place", "predict with rho",)),
    ("likelihood when only the target is dropped", ("likelihood",)),
    ("posterior when only the target is dropped", ("posterior",)),
    ("likelihood when every class is dropped", ("likelihood",)),
    ("posterior when every class is dropped", ("posterior",)),
    ("expected cross entropy", ("expected cross entropy",)),
    ("cross entropy plus the regulariser M", ("M",)),
    ("Jensen bound of M", ("Jensen", "bound",)),
    ("bound on the gradient of M", ("gradient",)),
    ("gradient of the cross entropy", ("gradient",)),
    ("the inequality", ("inequality",)),
]  # fmt: skip
#: "equation 5", "eq. 5", "eqs. 14 and 15", "equations 4 to 13", "equations 2, 3 and 5".
MENTION = re.compile(r"\b(?:eqs?\.|equations?) (\d+(?:(?:, | and | to )\d+)*)", re.IGNORECASE)


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
    table = dict(enumerate(EQUATIONS, start=1))
    found = mentions()
    assert len(found) > 15, "the pattern no longer finds the mentions"
    for where, numbers, around in found:
        for number in numbers:
            assert number in table, f"{where}: the paper has no equation {number}"
            name, words = table[number]
            assert any(word in around for word in words), (
                f"{where}: equation {number} is {name}, the text says: {around}"
            )


# --- docs/paper.md -----------------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "paper.md"
STATUSES = ("faithful", "reading", "not here")


def rows(text: str) -> list[list[str]]:
    """Return the cells of every row of every Markdown table, headings and rules left out."""
    lines = text.splitlines()
    found = []
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        is_rule = re.fullmatch(r"\|(\s*-+\s*\|)+", line)
        if line.startswith("|") and not is_rule and not re.fullmatch(r"\|(\s*-+\s*\|)+", below):
            found.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return found


def accounted() -> list[list[str]]:
    """Return the rows of the tables whose last column says how a thing is accounted for: it has no heading."""
    text = PAGE.read_text(encoding="utf-8")
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [row for table in tables if re.match(r"\|.*\| \|\n", table) for row in rows(table)]


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_everything_on_the_page_is_faithful_a_reading_or_not_here() -> None:
    found = accounted()
    assert len(found) > 60, "the tables are no longer found"
    for row in found:
        assert row[-1] in STATUSES, row
    assert {row[-1] for row in found} == set(STATUSES)


def test_every_equation_of_the_paper_is_on_the_page_once_and_by_its_name() -> None:
    listed = [(int(row[0]), row[1].replace("\\|", "|")) for row in accounted() if row[0].isdigit()]
    assert listed == [(number, name) for number, (name, _) in enumerate(EQUATIONS, start=1)]


def test_every_figure_of_the_paper_is_on_the_page() -> None:
    from dropmax.lab.figures.registry import FIGURES

    listed = [int(row[0].split(",")[0]) for row in accounted() if re.match(r"\d, ", row[0])]
    assert listed == [1, 2, 3, 4, 5, 6, 7]
    named = re.findall(r"--only ([\w-]+)", PAGE.read_text(encoding="utf-8"))
    assert set(named) <= set(FIGURES)
    for name, figure in FIGURES.items():
        if figure.place != "beyond the paper" and not figure.place.startswith("Appendix B"):
            assert name in named, f"{name} draws {figure.place}, and the page does not say so"


def test_every_python_name_on_the_page_exists() -> None:
    names = {span for span in spans(PAGE.read_text(encoding="utf-8")) if re.fullmatch(r"dropmax(\.\w+)+", span)}
    assert len(names) > 20
    for name in names:
        assert resolve(name) is not None, name


def resolve(name: str) -> Any:
    """Import as much of a dotted name as is a module, and get the rest of it as attributes."""
    import importlib

    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"{name} cannot be imported")


def test_every_command_on_the_page_exists_with_its_options() -> None:
    import typer

    from dropmax.cli import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = [span for span in spans(PAGE.read_text(encoding="utf-8")) if re.match(r"dropmax [a-z]", span)]
    assert len(found) > 8
    for span in found:
        words = span.split()
        assert words[1] in commands, span
        options = {option for parameter in commands[words[1]].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, span


def test_every_head_data_set_and_network_on_the_page_exists() -> None:
    from dropmax.heads import HEADS
    from dropmax.workbench.data import NAMES
    from dropmax.workbench.networks import NETWORKS

    text = PAGE.read_text(encoding="utf-8")
    for heading, names in (("head", HEADS), ("data set", NAMES), ("network", NETWORKS)):
        (table,) = re.findall(rf"^\| {heading} \|.*\n(?:^\|.*\n)+", text, re.MULTILINE)
        named = [span for row in rows(table) for span in spans(row[1]) if re.fullmatch(r"[a-z][a-z0-9-]*", span)]
        assert named, heading
        assert set(named) <= set(names), heading
        if heading == "head":
            assert named == list(HEADS)


def test_every_recipe_value_on_the_page_is_the_recipes() -> None:
    from dropmax.workbench.recipes import load_recipe, parse_toml, recipe_names

    checked = 0
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        recipe = None
        for span in spans(line):
            if span in recipe_names():
                recipe = load_recipe(span).to_dict()
            elif re.match(r"(training|data|network)\.\w+ = ", span):
                assert recipe is not None, f"no recipe is named before {span}"
                (table, values), *_ = parse_toml(span, "docs/paper.md").items()
                ((key, value),) = values.items()
                stored = recipe[table][key]
                assert (list(stored) if isinstance(stored, tuple) else stored) == value, f"{span} in: {line}"
                checked += 1
    assert checked > 40
    for column in ("mnist-1k", "mnist-5k", "mnist-55k", "cifar-10", "cifar-100", "awa", "cub"):
        assert f"`{column}.paper`" in PAGE.read_text(encoding="utf-8")
