"""``dropmax reproduce``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dropmax.cli.options import AsJson, DataDir, names
from dropmax.errors import InvalidValue, check_choice
from dropmax.workbench.recipes import parse_override
from dropmax.workbench.terminal import printable

if TYPE_CHECKING:
    from dropmax.lab.experiments import Plan


def reproduce(
    data: Annotated[
        list[str] | None,
        typer.Argument(
            help="Columns: mnist-1k, mnist-5k, cifar-10, ..., or your own data: a path, or package.module:function.",
            show_default=False,
        ),
    ] = None,
    study: Annotated[
        str | None,
        typer.Option(
            help="Variants in place of Table 1: a .toml file, or a name. DATA may replace its data.", show_default=False
        ),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="paper, released, or a recipe file (.toml).", show_default=False)
    ] = None,
    heads: Annotated[
        str, typer.Option(help="all, or names with commas; your own are package.module:Class or ./file.py:Class.")
    ] = "all",
    runs: Annotated[int | None, typer.Option(help="Seeds for each cell; 5 by default.", show_default=False)] = None,
    tune: Annotated[bool, typer.Option(help="Search each head's grid on the hold-out set first.")] = True,
    search: Annotated[
        str,
        typer.Option(help="wide: every head gets as many points. paper: what the paper searched, and no more."),
    ] = "wide",
    source: Annotated[
        Path | None,
        typer.Option("--tuned-from", help="Use what another table's tuning chose, in place of --tune."),
    ] = None,
    schedule_scale: Annotated[float, typer.Option(help="0.1 trains for a tenth of the epochs.")] = 1.0,
    train_size: Annotated[int, typer.Option(help="Train on this many examples; 0 for all.")] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override any value of the recipes.", metavar="NAME=VALUE"),
    ] = None,
    modes: Annotated[str, typer.Option(help="Ways of predicting to measure: all, or names with commas.")] = "all",
    engine: Annotated[str, typer.Option(help="local: processes on this machine. ray: a Ray cluster.")] = "local",
    address: Annotated[str, typer.Option(help="Address of the Ray cluster.")] = "auto",
    workers: Annotated[int, typer.Option(help="Runs at a time; 0 takes one per core.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Directory for results and tables.")] = Path("reproduction"),
    data_dir: DataDir = None,
    repair: Annotated[bool, typer.Option("--repair", help="Repeat damaged and failed runs.")] = False,
    keep_runs: Annotated[bool, typer.Option("--keep-runs", help="Keep the trained models, in OUT/models.")] = False,
    only_tables: Annotated[
        bool, typer.Option("--only-tables", help="Train nothing: write the tables of the results in OUT.")
    ] = False,
    metrics: Annotated[
        str, typer.Option("--metric", help="Tables to write, such as error,nll_scaled,aurc.")
    ] = "error,nll,ece",
    table_modes: Annotated[
        str,
        typer.Option(help="Ways of predicting that tables show; with mean,exact a row has another of its exact sum."),
    ] = "mean",
    compared: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--compare",
            help="Train nothing: the paired differences of two variants in OUT, such as dropmax@exact softmax.",
            metavar="A B",
            show_default=False,
        ),
    ] = None,
    formats: Annotated[str, typer.Option("--format", help="md, tex, or both with a comma.")] = "md",
    trust_code: Annotated[
        bool,
        typer.Option(
            "--trust-code",
            "--trust-head",
            "--trust-network",
            help="Import what a --study file names as package.module:name. Importing runs that code.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Reproduce the paper's Table 1, or a study: tune, run, tabulate. Stop it any time; it resumes where it stopped."""
    from dropmax.lab import experiments

    check_choice("engine", engine, ("local", "ray"))
    store = experiments.Store(out)
    if compared is not None:
        _compare(store, *compared, names(metrics), as_json)
        return
    failed: dict[str, str] = {}
    if not only_tables:
        overrides = dict(parse_override(text) for text in settings or [])
        shared = {"schedule_scale": schedule_scale, "train_size": train_size, "recipe": recipe, "overrides": overrides}
        plan = _plan(data, study, heads, runs, tune and search, trust_code, shared)
        if source is not None:
            plan = experiments.tuned_from(plan, source)
        failed = experiments.reproduce(
            plan,
            out,
            engine=experiments.Cluster(address, workers) if engine == "ray" else experiments.Local(workers),
            data_dir=data_dir,
            modes=None if modes == "all" else names(modes),
            repair=repair,
            keep_runs=keep_runs,
            quiet=as_json,
        ).failed
    written = experiments.write_tables(store, names(metrics), names(formats), modes=names(table_modes))
    tables = [experiments.make_table(store, metric, modes=names(table_modes)) for metric in names(metrics)]
    _report(store, failed, tables, written, as_json)
    if failed:
        name, reason = next(iter(failed.items()))
        others = ", ".join([f"{name} ({reason})", *list(failed)[1:]])
        print(printable(f"dropmax: failed: {others}; --repair tries again"), file=sys.stderr)
        raise typer.Exit(1)


def _plan(
    data: list[str] | None,
    study: str | None,
    heads: str,
    runs: int | None,
    tune: bool | str,
    trust_code: bool,
    shared: dict[str, Any],
) -> Plan:
    from dropmax.lab.experiments import plan_study, plan_table

    if study is not None:
        if heads != "all" or tune not in (True, "wide"):
            raise InvalidValue("a --study names its own variants and grids: leave out --heads, --no-tune, --search")
        return plan_study(study, data=data, runs=runs, trust_code=trust_code, **shared)
    if not data:
        raise InvalidValue("name the columns to reproduce, such as mnist-1k mnist-5k, or a --study FILE.toml")
    chosen = None if heads == "all" else names(heads)
    return plan_table(data, heads=chosen, runs=5 if runs is None else runs, tune=tune, **shared)


def _compare(store: Any, a: str, b: str, metrics: list[str], as_json: bool) -> None:
    from dropmax.errors import MissingDependency
    from dropmax.lab.experiments import compare, pictures
    from dropmax.workbench import style

    store.plan()  # refuses a directory without results
    found = compare.compare(store, a, b, metrics)
    if as_json:
        print(json.dumps({"a": a, "b": b, "differences": compare.to_rows(found)}))
        return
    compare.print_comparison(a, b, found)
    picture = store.path / f"compare-{a}-{b}.png"
    try:
        style.save(pictures.differences(a, b, found), picture)
        print(f"Drawn in {picture}.")
    except MissingDependency as error:
        print(f"dropmax: {error}", file=sys.stderr)


def _report(store: Any, failed: dict[str, str], tables: list[Any], written: list[str], as_json: bool) -> None:
    from dropmax.lab.experiments.render import print_table, to_dict

    if as_json:
        found = {table.metric: to_dict(table) for table in tables}
        print(json.dumps({"out": str(store.path), "failed": failed, "tables": found}))
        return
    print_table(tables[0])
    print(f"In {store.path}: {', '.join(written)}, and every run in results.jsonl.")
