"""Attacks on places: archives that write elsewhere, links in run directories, pipes among images."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from functools import partial
from pathlib import Path

import pytest

from dropmax.errors import DropMaxError
from dropmax.lab.experiments import Store, plan_table
from dropmax.workbench.data import load
from dropmax.workbench.data.folders import list_cub, read_listing
from dropmax.workbench.data.unpacking import unpack
from dropmax.workbench.files import write_atomically
from dropmax.workbench.recipes import load_recipe
from dropmax.workbench.training import RunDirectory, resume, train
from tests.slow.hostile import Attack, Ground
from tests.slow.image_files import pictures

__all__ = ["attacks"]


def attacks() -> dict[str, Attack]:
    """Return the attacks of this file."""
    found: dict[str, Attack] = {}
    for name in _MEMBERS:
        for packing in ("tar", "zip"):
            if packing == "tar" or "link" not in name or "symbolic" in name:
                found[f"an archive (.{packing}) with {name}"] = partial(_archive, packing, name)
    found |= {f"CUB with {what}": partial(_cub, line) for what, line in _CUB.items()}
    found |= {what: attack for attack, what in _PLACES.items()}
    return found


# --- archives ---------------------------------------------------------------------------------------------------

#: Members of an archive beside a sound one: name, what it links to, if it does, and how.
_MEMBERS: dict[str, list[tuple[str, str, str]]] = {
    "an absolute path": [("{victim}/diary.txt", "", "")],
    "a path that climbs": [("set/../../../victim/diary.txt", "", "")],
    "a path that climbs at once": [("../../victim/diary.txt", "", "")],
    "a path that climbs by backslashes": [("set\\..\\..\\victim\\diary.txt", "", "")],
    "a symbolic link to a folder, and a file through it": [
        ("set/door", "{victim}", "symbolic"), ("set/door/new", "", ""),
    ],
    "a symbolic link that climbs, and a file through it": [
        ("set/door", "../../../victim", "symbolic"), ("set/door/diary.txt", "", ""),
    ],
    "a hard link to a file": [("set/page", "{victim}/diary.txt", "hard")],
    "a symbolic link in place of the folder": [("set", "{victim}", "symbolic"), ("set/diary.txt", "", "")],
    "a pipe": [("set/pipe", "", "pipe")],
    "a name with terminal escapes": [("set/\x1b]0;pwned\x07", "", "")],
}  # fmt: skip


def _archive(packing: str, name: str, ground: Ground) -> str:
    members = [
        (m.format(victim=ground.victim), link.format(victim=ground.victim), how) for m, link, how in _MEMBERS[name]
    ]
    members = [("set/sound.txt", "", ""), *members]
    write = _write_tar if packing == "tar" else _write_zip
    archive = write(ground.folder, members)
    target = ground.folder / "target"
    target.mkdir()
    try:
        unpack(archive, "set", target, 10**6)
    except DropMaxError:
        left = [path.name for path in target.iterdir()]
        if left:
            pytest.fail(f"a refused archive left {left}")
        return "refused"
    pytest.fail("the archive was unpacked")


def _write_tar(folder: Path, members: list[tuple[str, str, str]]) -> Path:
    kinds = {"": tarfile.REGTYPE, "symbolic": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "pipe": tarfile.FIFOTYPE}
    with tarfile.open(folder / "a.tgz", "w:gz") as archive:
        for name, link, how in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kinds[how], link, 0 if how else 5
            archive.addfile(info, io.BytesIO(b"" if how else b"pwned"))
    return folder / "a.tgz"


def _write_zip(folder: Path, members: list[tuple[str, str, str]]) -> Path:
    modes = {"": 0o100644, "symbolic": 0o120777, "hard": 0o100644, "pipe": 0o010644}
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        for name, link, how in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = modes[how] << 16
            archive.writestr(info, link or "pwned")
    return folder / "a.zip"


# --- files that name others -------------------------------------------------------------------------------------

_CUB = {
    "an absolute path": "{victim}/diary.txt",
    "a path that climbs": "../../victim/diary.txt",
    "a path that climbs later": "a/../../../victim/diary.txt",
    "a backslash": "..\\..\\victim\\diary.txt",
    "half a name": "a\x00b.jpg",
}


def _cub(line: str, ground: Ground) -> str:
    tables = {
        "classes.txt": "1 1.owl\n2 2.wren\n",
        "images.txt": f"1 {line.format(victim=ground.victim)}\n2 b.jpg\n",
        "image_class_labels.txt": "1 1\n2 2\n",
        "train_test_split.txt": "1 1\n2 1\n",
    }
    for name, text in tables.items():
        (ground.folder / name).write_text(text)
    (ground.folder / "images").mkdir()
    read_listing(list_cub(ground.folder))
    pytest.fail("the listing was read")


def _pipe_among_images(ground: Ground) -> str:
    for label in ("cat", "dog"):
        (ground.folder / label).mkdir()
        (ground.folder / label / "a.png").write_bytes(pictures()["colour.png"])
    os.mkfifo(ground.folder / "dog" / "b.png")  # whoever opens it waits for ever
    load(ground.folder)
    pytest.fail("a pipe was read")


def _device_among_images(ground: Ground) -> str:
    for label in ("cat", "dog"):
        (ground.folder / label).mkdir()
        (ground.folder / label / "a.png").write_bytes(pictures()["colour.png"])
    (ground.folder / "dog" / "b.png").symlink_to("/dev/zero")  # whoever reads it reads for ever
    load(ground.folder)
    pytest.fail("a device was read")


# --- links in run directories -----------------------------------------------------------------------------------


def _tiny(ground: Ground) -> Path:
    """Train a run of one epoch on forty rows."""
    rows = [f"{k % 7},{k % 5},{'ab'[k % 2]}" for k in range(40)]
    (ground.folder / "a.csv").write_text("\n".join(["x,y,label", *rows]))
    recipe = load_recipe("own-features").override(
        {"data.name": str(ground.folder / "a.csv"), "network.hidden": [4], "training.epochs": 1}
    )
    return train(recipe, ground.folder / "run", quiet=True).path


def _train_into_link(ground: Ground) -> str:
    run = _tiny(ground)
    (ground.folder / "door").symlink_to(ground.victim)
    for force in (False, True):
        try:
            train(RunDirectory(run).recipe(), ground.folder / "door", force=force, quiet=True)
        except DropMaxError:
            continue
        pytest.fail("a run was written through a link")
    return "refused"


def _force_over_links(ground: Ground) -> str:
    run = _tiny(ground)
    (run / "tensorboard").symlink_to(ground.victim)
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(ground.victim / "diary.txt")
    train(RunDirectory(run).recipe(), run, force=True, quiet=True)
    return "neutralised"


def _resume_over_links(ground: Ground) -> str:
    run = _tiny(ground)
    for name in ("metrics.jsonl", "model.safetensors", "diagnosis.json"):
        (run / name).unlink(missing_ok=True)
    (run / "metrics.jsonl").symlink_to(ground.victim / "diary.txt")
    (run / ".left.tmp").symlink_to(ground.victim / "diary.txt")
    (run / ".right.tmp").mkdir()
    resume(run, quiet=True)
    if (run / "metrics.jsonl").is_symlink() or not (run / ".right.tmp").is_dir():
        pytest.fail("the log is still a link, or a folder of somebody's is gone")
    return "neutralised"


def _checkpoint_link(ground: Ground) -> str:
    run = _tiny(ground)
    (run / "model.safetensors").unlink()
    for path in RunDirectory(run).checkpoints():
        path.unlink()
    (run / "checkpoint-000001.pt").symlink_to(ground.victim / "diary.txt")
    resume(run, quiet=True)
    pytest.fail("a link to a diary was taken for a checkpoint")


def _report_over_link(ground: Ground) -> str:
    (ground.folder / "report.html").symlink_to(ground.victim / "diary.txt")
    write_atomically(ground.folder / "report.html", "a report")
    (ground.folder / "dangling").symlink_to(ground.victim / "new.txt")
    write_atomically(ground.folder / "dangling", "a report")
    return "neutralised"


def _names_that_climb(ground: Ground) -> str:
    """Let a plan call a variant something that would be a path elsewhere."""
    import json

    store = Store(ground.folder / "table")
    store.join(plan_table(["mnist-1k"], heads=["softmax"], runs=1), "dropmax reproduce")
    plan = json.loads(store.file.read_text())
    for group in plan["groups"].values():
        group["variant"] = "../../../victim/diary"
    store.file.write_text(json.dumps(plan) + "\n")
    store.plan()
    pytest.fail("a variant with a path for a name was accepted")


_PLACES: dict[Attack, str] = {
    _pipe_among_images: "a pipe among images",
    _device_among_images: "an endless device among images",
    _train_into_link: "a link in place of a run directory",
    _force_over_links: "links in a run that is replaced by --force",
    _resume_over_links: "links in a run that is resumed",
    _checkpoint_link: "a link in place of a checkpoint",
    _report_over_link: "a link in place of a report",
    _names_that_climb: "a variant named like a path",
}
