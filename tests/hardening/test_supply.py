"""What is installed is known: the short campaign on this environment, and that each check can fail."""

from __future__ import annotations

import json
import shutil
import zipfile
from email.message import Message
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hatchling", reason="needs the extra `dev`")

from dropmax.errors import RunError
from hardening import lock, supply
from hardening.campaign import Outcome
from hardening.licences import licence_of, verdict

ROOT = lock.ROOT


def made(folder: Path, name: str, version: str = "1.0", **fields: str | list[str]) -> Distribution:
    """A distribution as pip leaves it on disk, with one file."""
    place = folder / f"{name}-{version}.dist-info"
    place.mkdir(parents=True)
    message = Message()
    for key, value in {"Metadata-Version": "2.4", "Name": name, "Version": version, **fields}.items():
        for line in [value] if isinstance(value, str) else value:
            message[key.replace("_", "-")] = line
    (place / "METADATA").write_text(message.as_string())
    (folder / f"{name}.py").write_text("x = 1\n")
    digest = supply._digest(folder / f"{name}.py", "sha256")
    (place / "RECORD").write_text(f"{name}.py,sha256={digest},6\n{place.name}/RECORD,,\n")
    return PathDistribution(place)


# --- the real thing --------------------------------------------------------------------------------------------------


def test_the_short_campaign_finds_nothing_wrong_here(tmp_path: Path) -> None:
    outcome = supply.run(short=True, seed=0, scratch=tmp_path)
    # A developer may have tools of their own in the environment; the campaign counts them, this test does not mind.
    assert [line for line in outcome.failures if not line.startswith("pins:")] == []
    assert outcome.tried == sum(outcome.counts.values()) > 800
    assert outcome.counts.keys() & {"not audited", "audited, none known"}


def test_the_lock_agrees_with_the_constraints() -> None:
    outcome = Outcome()
    supply.check_lock(outcome, ROOT)
    assert outcome.failures == []
    assert outcome.counts == {"pinned with a hash": len(lock.read_pins(ROOT / "constraints.txt"))}


def test_every_installed_distribution_has_a_licence_we_may_use() -> None:
    outcome = Outcome()
    supply.check_licences(outcome, supply.installed_distributions())
    assert outcome.failures == []
    assert outcome.counts["licence permissive"] > 20


def test_copies_inside_another_package_are_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "site-packages/setuptools/_vendor/autocommand-2.2.2.dist-info"
    copy.mkdir(parents=True)
    (copy / "METADATA").write_text("Metadata-Version: 2.1\nName: autocommand\nVersion: 2.2.2\n")
    monkeypatch.syspath_prepend(str(copy.parent))
    names = {one.metadata["Name"].lower() for one in supply.installed_distributions()}
    assert "torch" in names
    assert "autocommand" not in names


def test_installed_files_are_those_of_their_wheels() -> None:
    outcome = Outcome()
    supply.check_files(outcome, supply.installed_distributions(), sample=150, seed=1)
    assert outcome.failures == []
    assert outcome.counts == {"file as in its wheel": 150}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return supply.build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_names_all_that_it_brings(wheel: Path, tmp_path: Path) -> None:
    locked = json.loads((ROOT / "dependencies.json").read_text())
    outcome = Outcome()
    supply.check_wheel(outcome, wheel, locked)
    assert outcome.failures == []
    with zipfile.ZipFile(wheel) as archive:
        bill = json.loads(archive.read("dropmax-0.1.0.dist-info/sboms/dropmax.cdx.json"))
    by_name = {one["name"]: one for one in bill["components"]}
    assert by_name["torch"]["scope"] == "required"
    assert by_name["torch"]["purl"] == "pkg:pypi/torch@2.13.0"
    assert by_name["fastapi"]["scope"] == "optional"
    assert "pytest" not in by_name
    direct = next(one for one in bill["dependencies"] if one["ref"] == bill["metadata"]["component"]["bom-ref"])
    assert {"pkg:pypi/torch@2.13.0", by_name["numpy"]["purl"], by_name["uvicorn"]["purl"]} <= set(direct["dependsOn"])
    again = supply.build_wheel(tmp_path)
    with zipfile.ZipFile(again) as archive:  # the same sources, the same bytes
        assert json.loads(archive.read("dropmax-0.1.0.dist-info/sboms/dropmax.cdx.json")) == bill


# --- each check can fail ---------------------------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    for name in ("constraints.txt", "constraints-hashed.txt", "dependencies.json"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "old", "new", "complaint"),
    [
        ("constraints.txt", "numpy==", "numpy==9", "numpy: 9"),
        ("constraints.txt", "numpy==", "nampy==", "nampy"),
        ("constraints-hashed.txt", "sha256:", "sha256:0", "constraints-hashed.txt is not what"),
        ("dependencies.json", '"sha256": "', '"sha256": "x', "is no SHA-256"),
    ],
)
def test_a_lock_that_does_not_fit_is_found(copied: Path, name: str, old: str, new: str, complaint: str) -> None:
    path = copied / name
    path.write_text(path.read_text().replace(old, new, 1))
    outcome = Outcome()
    supply.check_lock(outcome, copied)
    assert any(complaint in line for line in outcome.failures)


def test_a_line_that_pins_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text("# fine\nnumpy>=2\n")
    with pytest.raises(RunError, match=r"numpy>=2.*every line is to pin one version"):
        lock.read_pins(tmp_path / "constraints.txt")


def test_what_is_installed_and_not_pinned_is_found(tmp_path: Path) -> None:
    outcome = Outcome()
    found = [
        made(tmp_path, "one"),
        made(tmp_path, "two", "2.0+cpu"),
        made(tmp_path, "three", "3.1"),
        made(tmp_path, "pip"),
    ]
    supply.check_pins(outcome, {"two": "2.0", "three": "3.0"}, found)
    assert outcome.counts == {"installed as pinned": 1, "pins BROKEN": 2}
    assert [line.split(": ")[1] for line in outcome.failures] == [
        "one 1.0 is installed and not pinned",
        "three 3.1 is installed, 3.0 is pinned",
    ]


def test_a_requirement_that_is_not_met_is_found(tmp_path: Path) -> None:
    needs = ["numpy>=1", "numpy<1", "no-such-package", "other; extra == 'x'", "other; python_version < '3'"]
    outcome = Outcome()
    supply.check_requirements(outcome, [made(tmp_path, "one", Requires_Dist=needs)])
    assert outcome.counts == {"requirement met": 1, "requirements BROKEN": 2}


def test_a_changed_and_a_missing_file_are_found(tmp_path: Path) -> None:
    found = [made(tmp_path, name) for name in ("one", "two", "three")]
    (tmp_path / "two.py").write_text("x = 2\n")
    (tmp_path / "three.py").unlink()
    outcome = Outcome()
    supply.check_files(outcome, found, sample=None, seed=0)
    assert outcome.counts == {"file as in its wheel": 1, "files BROKEN": 2}
    assert "not what its wheel held" in outcome.failures[0]
    assert "three.py is missing" in outcome.failures[1]


@pytest.mark.parametrize(
    ("fields", "licence", "kind"),
    [
        ({"License_Expression": "MIT"}, "MIT", "permissive"),
        ({"License_Expression": "Apache-2.0 OR GPL-2.0-only"}, "Apache-2.0 OR GPL-2.0-only", "permissive"),
        (
            {"License_Expression": "MIT AND (GPL-3.0-only OR MPL-2.0)"},
            "MIT AND (GPL-3.0-only OR MPL-2.0)",
            "file copyleft",
        ),
        ({"License": "Apache License, Version 2.0"}, "Apache-2.0", "permissive"),
        ({"License": "MPL-2.0 AND MIT"}, "MPL-2.0 AND MIT", "file copyleft"),
        ({"Classifier": "License :: OSI Approved :: BSD License"}, "LicenseRef-BSD", "permissive"),
        ({"License": "Redistributions of source code ...\n        Neither the name of"}, "BSD-3-Clause", "permissive"),
        ({"License": "GPLv3"}, "GPL-3.0-or-later", "refused"),
        (
            {"Classifier": "License :: OSI Approved :: GNU Affero General Public License v3"},
            "GPL-3.0-or-later",
            "refused",
        ),
        ({"License_Expression": "SSPL-1.0"}, "SSPL-1.0", "refused"),
        ({"License_Expression": "MIT AND ("}, "MIT AND (", "unknown"),
        ({"License": "UNKNOWN"}, "", "unknown"),
        ({}, "", "unknown"),
    ],
)
def test_a_licence_is_read_and_judged(tmp_path: Path, fields: dict[str, str], licence: str, kind: str) -> None:
    one = made(tmp_path, "one", **fields)
    assert licence_of(one) == licence
    assert verdict(licence) == kind
    outcome = Outcome()
    supply.check_licences(outcome, [one])
    assert bool(outcome.failures) == (kind in ("refused", "unknown"))


EVENTS = [{"introduced": "1.0"}, {"fixed": "1.5"}, {"introduced": "2.0"}, {"last_affected": "2.3"}]


@pytest.mark.parametrize(
    ("version", "affected"),
    [
        ("0.9", False),
        ("1.0", True),
        ("1.4.9", True),
        ("1.5", False),
        ("2.0", True),
        ("2.3", True),
        ("2.4", False),
        ("7", True),
    ],
)
def test_a_range_of_versions_is_understood(version: str, affected: bool) -> None:
    entry = {"ranges": [{"type": "GIT", "events": []}, {"type": "ECOSYSTEM", "events": EVENTS}], "versions": ["7"]}
    assert supply.is_affected(version, entry) == affected


def test_a_known_hole_is_found_and_no_look_up_is_no_all_clear(tmp_path: Path) -> None:
    def advisory(number: int, **more: Any) -> None:
        package = {"ecosystem": "PyPI", "name": "One_Thing"}
        affected = [{"package": package, "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}]}]}]
        (tmp_path / f"{number}.json").write_text(json.dumps({"id": f"X-{number}", "affected": affected, **more}))

    pins = {"one-thing": "1.0", "other": "2.0"}
    unasked, empty = Outcome(), tmp_path / "empty"
    supply.check_advisories(unasked, pins, None)
    assert unasked.counts == {"not audited": 2}
    empty.mkdir()
    with pytest.raises(RunError, match=r"holds no \*\.json"):
        supply.check_advisories(Outcome(), pins, empty)
    advisory(1, withdrawn="2025-01-01T00:00:00Z")
    clear = Outcome()
    supply.check_advisories(clear, pins, tmp_path)
    assert clear.counts == {"audited, none known": 2}
    advisory(2)
    holes = Outcome()
    supply.check_advisories(holes, pins, tmp_path)
    assert holes.failures == ["advisories: one-thing 1.0: X-2"]


def test_a_wheel_without_its_bill_or_with_another_is_found(wheel: Path, tmp_path: Path) -> None:
    locked = json.loads((ROOT / "dependencies.json").read_text())
    bare = tmp_path / "bare.whl"
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(bare, "w") as new:
        for name in old.namelist():
            if "/sboms/" not in name:
                new.writestr(name, old.read(name))
    outcome = Outcome()
    supply.check_wheel(outcome, bare, locked)
    assert "0 files in sboms" in outcome.failures[0]
    torch = next(one for one in locked["packages"] if one["name"] == "torch")
    torch["sha256"] = "0" * 64
    outcome = Outcome()
    supply.check_wheel(outcome, wheel, locked)
    assert outcome.failed == 1
    assert "torch" in outcome.failures[0]


def test_a_report_without_hashes_makes_no_lock() -> None:
    report = {"install": [{"metadata": {"name": "Torch"}, "download_info": {"archive_info": {}}}]}
    with pytest.raises(RunError, match="no hash for torch, numpy"):
        lock.lock({"torch": "2.13.0", "numpy": "2.4.6"}, report)


def test_the_lock_says_which_platform_it_was_made_for() -> None:
    locked = json.loads((ROOT / "dependencies.json").read_text())
    assert locked["wheels_for"] == "CPython 3.11 on Linux x86_64"
    assert "--require-hashes -r constraints-hashed.txt" in (ROOT / "Makefile").read_text()
