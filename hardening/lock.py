"""``python -m hardening.lock``: write what is known of every pinned package, for CI, for the SBOM and for the checks.

Reads ``constraints.txt`` and what is installed here; asks pip which file of each version it would take on this machine.
Writes ``dependencies.json`` (version, licence, requirements, hashes) and ``constraints-hashed.txt`` (the same pins as
pip's ``--require-hashes`` wants them). Wheels differ by platform: both hold for the one named in them.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dropmax.errors import DropMaxError, RunError
from dropmax.workbench.files import write_atomically
from hardening.licences import licence_of

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
#: Extras of ours that only developers install.
OURS = {"dev", "docs"}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m hardening.lock", description="Renew hashes, licences, SBOM input.")
    parser.add_argument("--report", type=Path, metavar="FILE", help="a report of pip's, instead of asking pip again")
    options = parser.parse_args(arguments)
    try:
        pins = read_pins(ROOT / "constraints.txt")
        report = json.loads(options.report.read_text()) if options.report else ask_pip(ROOT / "constraints.txt")
        content = lock(pins, report)
    except DropMaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_atomically(ROOT / "dependencies.json", json.dumps(content, indent=1) + "\n")
    write_atomically(ROOT / "constraints-hashed.txt", as_requirements(content))
    print(f"{len(content['packages'])} packages written to dependencies.json and constraints-hashed.txt")
    return 0


def read_pins(path: Path) -> dict[str, str]:
    """Return name and version of every line ``name==version``; names in the one form the index compares them in."""
    pins: dict[str, str] = {}
    for line in path.read_text().splitlines():
        line = line.partition("#")[0].strip().rstrip("\\").strip()
        if line and not line.startswith("--hash"):
            name, exactly, version = line.partition("==")
            if not exactly:
                raise RunError(f"{path.name} has the line {line!r}: every line is to pin one version, name==version")
            pins[canonicalize_name(name)] = version.strip()
    return pins


def ask_pip(constraints: Path) -> dict[str, Any]:
    """Return pip's report on installing exactly the pinned versions, without installing them: takes some minutes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        what = ["--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:", "-r", str(constraints)]
        done = subprocess.run([*pip, *what, "--report", str(path)], check=False, capture_output=True, text=True)
        if done.returncode:
            raise RunError(f"pip could not find the pinned versions: {done.stderr.strip()[-300:]}")
        if "yanked" in done.stderr:
            raise RunError(f"a pinned version was withdrawn by its authors: {done.stderr.strip()[-300:]}")
        report: dict[str, Any] = json.loads(path.read_text())
        return report


def lock(pins: dict[str, str], report: dict[str, Any]) -> dict[str, Any]:
    """Return the pins with licence, scope, requirements and hashes."""
    hashes: dict[str, Any] = {}
    for one in report["install"]:
        archive = one["download_info"].get("archive_info", {})
        hashes[canonicalize_name(one["metadata"]["name"])] = archive.get("hashes", {}).get("sha256")
    missing = [name for name in pins if not hashes.get(name)]
    if missing:
        raise RunError(f"pip's report has no hash for {', '.join(missing)}: leave out --report to ask again")
    direct, scopes, needs = _graph()
    packages = [
        {
            "name": name,
            "version": version,
            "licence": _licence(name),
            "scope": scopes.get(name, "development"),
            "requires": sorted(need for need in needs.get(name, ()) if need in pins),
            "sha256": hashes[name],
        }
        for name, version in sorted(pins.items())
    ]
    python = f"{platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}"
    where = f"{python} on {platform.system()} {platform.machine()}"
    return {"wheels_for": where, "requires": sorted(direct & pins.keys()), "packages": packages}


def as_requirements(content: dict[str, Any]) -> str:
    """Return the lock in the form that pip reads."""
    head = (
        f"# Made by `make lock` from constraints.txt: wheels for {content['wheels_for']}, torch's the build for CPUs.\n"
        "# pip install --require-hashes -r constraints-hashed.txt\n"
    )
    lines = [f"{one['name']}=={one['version']} --hash=sha256:{one['sha256']}\n" for one in content["packages"]]
    return head + "".join(lines)


def _licence(name: str) -> str:
    try:
        return licence_of(distribution(name))
    except PackageNotFoundError:
        raise RunError(
            f"{name} is pinned and not installed: make .venv/.dev, or take it out of constraints.txt"
        ) from None


def _graph() -> tuple[set[str], dict[str, str], dict[str, set[str]]]:
    """Return what dropmax names itself, and for each package it leads to its scope and what it needs in turn."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [
        line for extra, lines in project["optional-dependencies"].items() if extra not in OURS for line in lines
    ]
    scopes: dict[str, str] = {}
    needs: dict[str, set[str]] = {}
    every = [line for lines in project["optional-dependencies"].values() for line in lines]
    for scope, lines in (("required", project["dependencies"]), ("optional", optional), ("development", every)):
        waiting = list(_requirements(lines, set()))
        seen: set[tuple[str, str]] = set()
        while waiting:
            name, extras = waiting.pop()
            if (name, str(sorted(extras))) in seen or name == "dropmax":
                continue
            seen.add((name, str(sorted(extras))))
            scopes.setdefault(name, scope)
            try:
                found = list(_requirements(distribution(name).requires or [], extras))
            except PackageNotFoundError:
                continue
            needs.setdefault(name, set()).update(need for need, _ in found)
            waiting += found
    direct = {name for name, _ in _requirements([*project["dependencies"], *optional], set())}
    return direct, scopes, needs


def _requirements(lines: Iterable[str], extras: set[str]) -> Iterator[tuple[str, set[str]]]:
    for line in lines:
        one = Requirement(line)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in (extras or {""})):
            yield canonicalize_name(one.name), one.extras


if __name__ == "__main__":
    sys.exit(main())
