"""``dropmax explore``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dropmax.cli.options import DataDir, MovedData, TrustCode, use_threads
from dropmax.errors import MissingDependency


def explore(
    run: Annotated[Path, typer.Argument(help="A run directory, or a model.safetensors.")],
    beside: Annotated[Path | None, typer.Argument(help="A second run on the same data, shown beside it.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; only this machine can reach 127.0.0.1.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)] = 8765,
    open_browser: Annotated[bool, typer.Option("--open/--no-browser", help="Open the page in a browser.")] = False,
    data: MovedData = None,
    data_dir: DataDir = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    threads: Annotated[
        int,
        typer.Option(help="CPU threads; by default torch's choice at the start, and one per answer.", min=0),
    ] = 0,
    trust_code: TrustCode = False,
) -> None:
    """Look at a trained model, or at two side by side, in the browser: test examples, your own images, a class map."""
    try:
        from dropmax.lab.explorer import server
        from dropmax.lab.explorer.app import create_app
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "starlette", "uvicorn", "anyio"):
            raise
        raise MissingDependency.extra(error.name or "fastapi", "explore", "the explorer") from error
    from dropmax.lab.explorer import Explorer

    use_threads(threads)
    with server.bind(host, port) as bound:  # a port that is taken should be known before the model is measured
        explorer = Explorer.open(
            run, beside=beside, data_dir=data_dir, moved=data, device=device, trust_code=trust_code
        )
        # One image at a time is too little to share: on a busy machine two threads wait longer than one works.
        use_threads(threads or 1)
        app = create_app(explorer, host)
        place = server.address(bound)
        if not server.is_loopback(bound):
            print(
                f"dropmax: warning: listening on {host}, everyone who can reach this machine can use the explorer",
                file=sys.stderr,
            )
        bound.listen()  # from here on the system queues connections until the server takes them
        print(f"The explorer is at {place}  (Ctrl-C stops it)", flush=True)
        if open_browser:
            import webbrowser

            webbrowser.open(place)
        server.serve(app, bound)
