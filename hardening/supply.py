"""What is installed: pinned, with known hashes, whole on disk, licensed, without known holes, and named in the wheel.

Advisories are looked up offline, in a folder of OSV files (``*.json``, as the Python advisory database exports them)
that ``DROPMAX_ADVISORIES`` names. Without it nothing is looked up, and that is what is counted: "not audited".
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from dropmax.errors import RunError
from dropmax.workbench.progress import progress
from hardening.campaign import Outcome
from hardening.licences import licence_of, verdict
from hardening.lock import ROOT, as_requirements, read_pins

#: What a virtual environment begins with, and we ourselves.
NOT_PINNED = {"pip", "dropmax"}


def run(*, short: bool, seed: int, scratch: Path) -> Outcome:
    """Check the lock, the environment this runs in, and a wheel built for the purpose."""
    outcome = Outcome()
    pins = read_pins(ROOT / "constraints.txt")
    installed = installed_distributions()
    check_lock(outcome, ROOT)
    check_pins(outcome, pins, installed)
    check_requirements(outcome, installed)
    check_files(outcome, installed, sample=400 if short else None, seed=seed)
    check_licences(outcome, installed)
    advisories = os.environ.get("DROPMAX_ADVISORIES")
    check_advisories(outcome, pins, Path(advisories) if advisories else None)
    check_wheel(outcome, build_wheel(scratch), json.loads((ROOT / "dependencies.json").read_text()))
    return outcome


def installed_distributions() -> list[Distribution]:
    """Return what is installed, wherever packages are.

    Not what is merely on the path: setuptools, once imported, puts the copies it carries there.
    """
    places = [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]
    return list(distributions(path=places))


def check_lock(outcome: Outcome, root: Path) -> None:
    """Compare ``constraints.txt``, ``constraints-hashed.txt`` and ``dependencies.json``: one set of versions in all."""
    pins = read_pins(root / "constraints.txt")
    locked = json.loads((root / "dependencies.json").read_text())
    known = {one["name"]: one for one in locked["packages"]}
    for name in sorted(pins.keys() | known.keys()):
        version = known.get(name, {}).get("version")
        digest = str(known.get(name, {}).get("sha256", ""))
        if version != pins.get(name):
            _note(
                outcome,
                "lock",
                f"{name}: {pins.get(name)} in constraints.txt, {version} in dependencies.json: make lock",
            )
        elif len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            _note(outcome, "lock", f"{name}: {digest!r} is no SHA-256")
        else:
            outcome.count("pinned with a hash")
    if (root / "constraints-hashed.txt").read_text() != as_requirements(locked):
        outcome.fail("lock: constraints-hashed.txt is not what dependencies.json says: make lock")


def check_pins(outcome: Outcome, pins: dict[str, str], installed: Iterable[Distribution]) -> None:
    """Every installed distribution has the version it is pinned to; ``2.13.0+cpu`` is a build of 2.13.0."""
    for one in installed:
        name = canonicalize_name(one.metadata["Name"])
        if name in NOT_PINNED:
            continue
        if name not in pins:
            _note(outcome, "pins", f"{name} {one.version} is installed and not pinned")
        elif one.version.partition("+")[0] != pins[name]:
            _note(outcome, "pins", f"{name} {one.version} is installed, {pins[name]} is pinned")
        else:
            outcome.count("installed as pinned")


def check_requirements(outcome: Outcome, installed: Iterable[Distribution]) -> None:
    """Every requirement of every installed distribution is met."""
    for one in installed:
        for line in one.requires or []:
            need = Requirement(line)
            if need.marker is not None and not need.marker.evaluate({"extra": ""}):
                continue
            try:
                version = distribution(need.name).version
            except PackageNotFoundError:
                version = ""
            if version and need.specifier.contains(version, prereleases=True):
                outcome.count("requirement met")
            else:
                _note(
                    outcome, "requirements", f"{one.metadata['Name']} needs {line}, {version or 'nothing'} is installed"
                )


def check_files(outcome: Outcome, installed: Iterable[Distribution], *, sample: int | None, seed: int) -> None:
    """Every installed file has the hash that its wheel's RECORD gave it; ``sample`` takes so many at random."""
    files = [file for one in installed for file in one.files or [] if file.hash is not None]
    if sample is not None:
        files = random.Random(seed).sample(files, min(sample, len(files)))
    with progress("hashing installed files", len(files), "files") as advance:
        for file in files:
            assert file.hash is not None
            path = Path(str(file.locate()))
            found = _digest(path, file.hash.mode) if path.is_file() else "missing"
            if found == file.hash.value:
                outcome.count("file as in its wheel")
            else:
                _note(outcome, "files", f"{path} is {'missing' if found == 'missing' else 'not what its wheel held'}")
            advance(1)


def check_licences(outcome: Outcome, installed: Iterable[Distribution]) -> None:
    """Every distribution has a licence, and one that asks nothing of our own code."""
    table = {}
    for one in installed:
        licence = licence_of(one)
        kind = verdict(licence)
        table[f"{one.metadata['Name']} {one.version}"] = licence
        if kind in ("permissive", "file copyleft"):
            outcome.count(f"licence {kind}")
        else:
            _note(outcome, "licences", f"{one.metadata['Name']}: the licence {licence!r} is {kind}")
    outcome.details["licences"] = dict(sorted(table.items(), key=lambda item: item[0].lower()))


def check_advisories(outcome: Outcome, pins: dict[str, str], folder: Path | None) -> None:
    """Look every pin up in a folder of OSV files."""
    if folder is None:
        outcome.count("not audited", len(pins))
        outcome.details["advisories"] = "no advisory was looked up: DROPMAX_ADVISORIES names no folder of OSV files"
        return
    paths = sorted(folder.rglob("*.json"))
    if not paths:
        raise RunError(f"DROPMAX_ADVISORIES={folder} holds no *.json: unpack an OSV export of the ecosystem PyPI there")
    holes: dict[str, list[str]] = {}
    for path in paths:
        advisory = json.loads(path.read_text(encoding="utf-8"))
        for affected in [] if advisory.get("withdrawn") else advisory.get("affected", []):
            package = affected.get("package", {})
            name = canonicalize_name(package.get("name", ""))
            if package.get("ecosystem") == "PyPI" and name in pins and is_affected(pins[name], affected):
                holes.setdefault(name, []).append(str(advisory["id"]))
    for pinned, version in pins.items():
        if pinned in holes:
            _note(outcome, "advisories", f"{pinned} {version}: {', '.join(sorted(holes[pinned]))}")
        else:
            outcome.count("audited, none known")
    outcome.details["advisories"] = f"{len(paths):,} advisories looked up"


def is_affected(version: str, affected: dict[str, Any]) -> bool:
    """Return whether OSV's ``affected`` entry covers a version: listed, or within a range of the ecosystem's order."""
    if version in affected.get("versions", []):
        return True
    ours = Version(version)
    for one in affected.get("ranges", []):
        if one.get("type") != "ECOSYSTEM":
            continue
        within = False
        events = [(_version(value), kind) for event in one["events"] for kind, value in event.items()]
        for bound, kind in sorted(events, key=lambda event: (event[0], event[1] != "introduced")):
            if kind == "introduced" and ours >= bound:
                within = True
            elif (kind == "fixed" and ours >= bound) or (kind == "last_affected" and ours > bound):
                within = False
        if within:
            return True
    return False


def build_wheel(scratch: Path) -> Path:
    """Build the wheel of this checkout with what is installed, and return its path."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(scratch)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise RunError(f"the wheel cannot be built: {(done.stderr or done.stdout).strip()[-300:]}")
    return wheels[0]


def check_wheel(outcome: Outcome, wheel: Path, locked: dict[str, Any]) -> None:
    """The wheel's bill of materials is CycloneDX, names all that installing the wheel brings, and hangs together."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/sboms/" in name]
        if len(names) != 1:
            return _note(outcome, "SBOM", f"{wheel.name} has {len(names)} files in sboms, one was expected")
        bill = json.loads(archive.read(names[0]))
        record = archive.read(names[0].partition("/")[0] + "/RECORD").decode()
    head = (bill.get("bomFormat"), bill.get("specVersion"), bill.get("version"), names[0][-9:], names[0] in record)
    if head != ("CycloneDX", "1.6", 1, ".cdx.json", True):
        _note(outcome, "SBOM", f"{names[0]} starts {head}")
    listed = {one["name"]: (one["version"], one["hashes"][0]["content"], one["scope"]) for one in bill["components"]}
    expected = {
        one["name"]: (one["version"], one["sha256"], one["scope"])
        for one in locked["packages"]
        if one["scope"] != "development"
    }
    for name in sorted(listed.keys() | expected.keys()):
        if listed.get(name) == expected.get(name):
            outcome.count("component in the SBOM")
        else:
            _note(outcome, "SBOM", f"{name}: {listed.get(name)} in the wheel's bill, {expected.get(name)} locked")
    known = {bill["metadata"]["component"]["bom-ref"], *(one["bom-ref"] for one in bill["components"])}
    used = [ref for one in bill["dependencies"] for ref in (one["ref"], *one["dependsOn"])]
    if set(used) != known or len(known) != len(bill["components"]) + 1:
        _note(
            outcome, "SBOM", f"references that lead nowhere, or components nobody leads to: {sorted(set(used) ^ known)}"
        )


def _note(outcome: Outcome, what: str, line: str) -> None:
    outcome.count(f"{what} BROKEN")
    outcome.fail(f"{what}: {line}")


def _digest(path: Path, mode: str) -> str:
    digest = hashlib.new(mode)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")
