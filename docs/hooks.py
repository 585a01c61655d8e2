"""Pages made from the code: the command reference; and links out of docs/ into the repository."""

from __future__ import annotations

import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_REPOSITORY = re.compile(r"\]\(\.\./(?!\.\.)([^)#]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add commands.md."""
    files.append(File.generated(config, "commands.md", content=command_reference()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name a file of the repository that is no page of the site, rather than link to nowhere."""
    return _REPOSITORY.sub(r"] (`\1` in the repository)", markdown)


def command_reference() -> str:
    """Return every command with its help, arguments and options, as Markdown."""
    import typer.main

    from dropmax.cli import app

    lines = ["# Commands", "", "Made from the code: what `dropmax COMMAND --help` says.", ""]
    lines += _describe(typer.main.get_command(app), "dropmax")
    return "\n".join(lines) + "\n"


def _describe(command: Any, name: str) -> list[str]:
    children = getattr(command, "commands", None)
    lines = []
    if name != "dropmax":
        lines += [f"## {name}", "", _text(command.help), ""]
    rows = [_row(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
    if rows and not children:
        lines += ["| | meaning | default |", "|---|---|---|", *rows, ""]
    for child in sorted(children or ()):
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
