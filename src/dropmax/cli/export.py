"""``dropmax export``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dropmax.cli.options import AsJson, DataDir, Threads, TrustCode, use_threads
from dropmax.errors import InvalidValue

FORMATS = ("onnx", "torch-export", "safetensors", "hub")


def export(
    run: Annotated[Path, typer.Argument(help="A run directory, or a model.safetensors.")],
    form: Annotated[str, typer.Option("--format", help="onnx, torch-export, safetensors, or hub: a model repository.")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write; for hub, a directory.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    push: Annotated[
        str | None, typer.Option(help="With --format hub: upload to this repository.", metavar="OWNER/NAME")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a repository that --push creates private.")] = False,
    data_dir: DataDir = None,
    threads: Threads = 0,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Write a trained model as a file to serve without dropmax, or as a model repository with a card."""
    from dropmax.checks import check_choice

    check_choice("format", form, FORMATS)
    if form != "hub" and (push is not None or private):
        raise InvalidValue("--push and --private go with --format hub")
    if private and push is None:
        raise InvalidValue("--private goes with --push OWNER/NAME")
    if out is None and push is None:
        raise InvalidValue("say where to write with --out" + (", or upload with --push OWNER/NAME" * (form == "hub")))
    use_threads(threads)
    if form == "hub":
        from dropmax.workbench.hub import push_to_hub, save_pretrained

        report = {"run": str(run), "format": form}
        if out is not None:
            report["directory"] = str(save_pretrained(run, out, data_dir=data_dir, force=force, trust_code=trust_code))
        if push is not None:
            report["url"] = push_to_hub(out or run, push, data_dir=data_dir, private=private, trust_code=trust_code)
        print(json.dumps(report) if as_json else "\n".join(f"The model is in {v}" for v in list(report.values())[2:]))
        return
    from dropmax.workbench.export import export as write

    assert out is not None
    found = {"run": str(run), **write(run, out, format=form, force=force, trust_code=trust_code)}
    if as_json:
        print(json.dumps(found))
        return
    checked = (
        "" if form == "safetensors" else f"; its answers differ from PyTorch's by {found['largest_difference']:.1e}"
    )
    note = f"; {found['note']}" if "note" in found else ""
    print(f"{out} holds the model ({found['bytes'] / 1e6:.1f} MB){checked}{note}")
