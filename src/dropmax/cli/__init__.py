"""The command line: one thin file per command; torch is imported only once a command needs it."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from dropmax.cli import (
    calibrate,
    data,
    demo,
    diagnose,
    doctor,
    embed,
    evaluate,
    explore,
    export,
    figures,
    predict,
    report,
    reproduce,
    train,
)
from dropmax.errors import DropMaxError
from dropmax.workbench.terminal import printable

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: the boxes of rich spend a third of a page on "<bool>"
    help="A softmax that learns, for each input, which rival classes deserve attention.",
)
app.command("demo")(demo.demo)
app.add_typer(data.app, name="data")
app.command("embed")(embed.embed)
app.command("train")(train.train)
app.command("calibrate")(calibrate.calibrate)
app.command("evaluate")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.command("diagnose")(diagnose.diagnose)
app.command("export")(export.export)
app.command("figures")(figures.figures)
app.command("report")(report.report)
app.command("explore")(explore.explore)
app.command("reproduce")(reproduce.reproduce)
app.command("doctor")(doctor.doctor)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """A softmax that learns, for each input, which rival classes deserve attention."""
    if show:
        from dropmax import __version__

        print(f"dropmax {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; a user's mistake ends in one line on standard error and exit code 2.

    Exit code 1 is a problem that no other arguments would solve (a full disk, runs that failed, damaged data), 130
    is Ctrl-C.
    """
    try:
        app()
    except DropMaxError as error:
        print(f"dropmax: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        sys.exit({"Interrupted": 130, "CannotWrite": 1}.get(type(error).__name__, 2))
    except KeyboardInterrupt:
        print("dropmax: stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `dropmax ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
