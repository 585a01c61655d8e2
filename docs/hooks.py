"""Pages made from the code: docstrings, the command reference, links into the repository, formulas as MathML."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

_ROLE = re.compile(r":[a-z]+:`~?([^`]+)`")
_LITERAL_BLOCK = re.compile(r"::$", re.MULTILINE)
_REPOSITORY = re.compile(r"\]\(\.\./(?!\.\.)([^)#]+)\)")
_CHART = re.compile(r"<!-- chart: ([\w/-]+) -->")
#: ``<!-- curves: STUDY | METRIC, METRIC | variant=Name, ... -->`` and ``<!-- ranks: STUDY, STUDY | METRICS | ... -->``.
_PICTURE = re.compile(r"<!-- (curves|ranks): ([^|]+)\|([^|]+)\|(.+?) -->", re.DOTALL)
_TABLE_ROW = re.compile(r"^\| \**([^|*]+?)\** \| \**([\d.]+) ± ([\d.]+)\** \|", re.MULTILINE)


class Markdown(griffe.Extension):
    """Docstrings are written for `help()`: turn roles into code and ``::`` at the end of a line into a colon."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object once it is known."""
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _LITERAL_BLOCK.sub(":", text)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add commands.md."""
    files.append(File.generated(config, "commands.md", content=command_reference()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name a file of the repository that is not a page of the site, rather than link to nowhere; draw charts."""
    markdown = _CHART.sub(lambda match: f"\n{results_chart(match[1])}\n", markdown)
    markdown = _PICTURE.sub(lambda match: f"\n{picture(*match.groups())}\n", markdown)
    return _REPOSITORY.sub(r"] (`\1` in the repository)", markdown)


_SHIM = "https://unpkg.com/iframe-worker/shim"


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Load the script with which search works from disk from the site itself, not from another host."""
    return output.replace(_SHIM, get_relative_url("iframe-worker.js", page.url))


def on_post_template(output_content: str, **_: Any) -> str:
    """Do the same for pages made from a template, such as 404.html."""
    return output_content.replace(_SHIM, "iframe-worker.js")


_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(html_text: str, **_: Any) -> str:
    """Turn LaTeX into MathML, which browsers typeset themselves: no script, no font, and it works from disk.

    Numbers stay on one line with their intervals.
    """
    import html as entities

    from latex2mathml.converter import convert

    def formula(match: re.Match[str]) -> str:
        shown = "block" if match[2] == "[" else "inline"
        return convert(entities.unescape(match[3]).strip(), display=shown)

    return _FORMULA.sub(formula, html_text).replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def results_chart(study: str) -> str:
    """Return the errors in a table of results.md as an SVG in the colours of the page."""
    from dropmax.lab.report.sections import inline
    from dropmax.workbench import style

    page = (Path(__file__).parent / "results.md").read_text(encoding="utf-8")
    table = page.partition(f"<!-- table: {study} |")[2].partition("<!-- end -->")[0]
    rows = [(name, float(mean), float(half)) for name, mean, half in _TABLE_ROW.findall(table)]
    figure, axes = style.pyplot().subplots(figsize=(6.4, 0.6 + 0.3 * len(rows)))
    for place, (name, mean, half) in enumerate(rows):
        colour = style.BLUE if name == "DropMax" else style.GREY
        axes.errorbar(mean, place, xerr=half, fmt="o", color=colour, capsize=3, markersize=5)
        axes.annotate(f"{mean:.2f}", (mean + half, place), (6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set(xlabel="test error (%), mean and 95 % interval over five seeds", ylim=(len(rows) - 0.5, -0.5))
    axes.set_xlim(right=1.08 * max(mean + half for _, mean, half in rows))
    return re.sub(r"\n\s*", " ", inline(figure, "Test error of each head"))


def picture(kind: str, studies: str, metrics: str, rows: str) -> str:
    """Return validation curves of a study, or a critical-difference diagram of several, in the colours of the page."""
    from dropmax.lab.experiments import Store, pictures
    from dropmax.lab.report.sections import inline

    stores = [Store(Path(__file__).parents[1] / "results" / name.strip()) for name in studies.split(",")]
    runs = [[run for run in store.runs() if run.status == "done"] for store in stores]
    names = dict(row.strip().split("=", 1) for row in re.split(r",\s*(?=[\w./@+-]+=)", rows))  # a name may hold a comma
    shown = [metric.strip() for metric in metrics.split(",")]
    if kind == "ranks":
        figure = pictures.ranks(runs, shown, names)
        label = f"Mean ranks of {len(names)} methods on {len(runs)} data sets"
    else:
        figure, label = pictures.curves(runs[0], shown, names), f"Validation curves of {len(names)} methods"
    return re.sub(r"\n\s*", " ", inline(figure, label))


def command_reference() -> str:
    """Return every command with its help, arguments and options, as Markdown."""
    import typer.main

    from dropmax.cli import app

    lines = ["# Commands", "", "Made from the code: what `dropmax COMMAND --help` says.", ""]
    lines += _describe(typer.main.get_command(app), "dropmax")
    return "\n".join(lines) + "\n"


def _describe(command: Any, name: str) -> list[str]:
    children = getattr(command, "commands", {})
    lines = [] if name == "dropmax" else [f"## {name}", "", _text(command.help), ""]
    rows = [_row(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
    if rows and not children:
        lines += ["| | meaning | default |", "|---|---|---|", *rows, ""]
    for child in sorted(children):
        lines += _describe(children[child], f"{name} {child}")
    return lines


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        spelling = f"`{(parameter.metavar or parameter.name).upper()}`"
    else:
        spelling = ", ".join(f"`{option}`" for option in [*parameter.opts, *parameter.secondary_opts])
    default = parameter.default
    shown = "" if default in (None, False, ()) or callable(default) else f"`{default}`"
    return f"| {spelling} | {_text(getattr(parameter, 'help', ''))} | {shown} |"


def _text(help_text: str | None) -> str:
    return " ".join((help_text or "").split()).replace("|", "\\|")
