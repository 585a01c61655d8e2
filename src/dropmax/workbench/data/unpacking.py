"""Unpacking archives that may be hostile: plain files and folders below the target, and nothing else."""

from __future__ import annotations

import shutil
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from dropmax.errors import DataError

_BLOCK = 1 << 20


def unpack(archive: Path, folder: str, target: Path, limit: int) -> Path:
    """Unpack ``folder`` of a .tar.gz, .tgz or .zip archive as ``target/folder``, which appears only once it is whole.

    Every member is looked at, also those outside ``folder``, which are not unpacked: an absolute path, one that
    climbs with ``..``, a link or a device anywhere refuses the archive. So does unpacking to more than ``limit`` bytes.
    """
    final = target / folder
    if final.exists():
        raise DataError(f"{final} is in the way: move it elsewhere and try again")
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=target) as temporary:
        left = limit
        try:
            for name, stream in _members(archive):
                place = Path(temporary, *name.parts)
                if name.parts[0] != folder:
                    continue
                if stream is None:
                    place.mkdir(parents=True, exist_ok=True)
                    continue
                place.parent.mkdir(parents=True, exist_ok=True)
                with open(place, "xb") as out:
                    while block := stream.read(_BLOCK):
                        left -= len(block)
                        if left < 0:
                            raise DataError(
                                f"{archive} unpacks to more than {limit:,} bytes: it is not what it should be"
                            )
                        out.write(block)
        except DataError:
            raise
        except OSError as error:
            raise DataError(f"{archive} cannot be unpacked: {error}") from error
        except Exception as error:  # tarfile, zipfile and the decompressors raise a dozen kinds on damaged archives
            raise DataError(f"{archive} is damaged and cannot be unpacked: {error}") from error
        if not Path(temporary, folder).is_dir():
            raise DataError(f"{archive} has no folder {folder} in it")
        shutil.move(str(Path(temporary, folder)), final)  # a rename: both are in target
    return final


def _members(archive: Path) -> Iterator[tuple[PurePosixPath, IO[bytes] | None]]:
    """Yield every member's safe name and, for files, its content."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as contents:
            for info in contents.infolist():
                kind = stat.S_IFMT(info.external_attr >> 16)
                if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                    raise DataError(f"{archive} holds a link or device, {info.filename!r}: it is not unpacked")
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # the others know no bounds
                    raise DataError(f"{archive} holds {info.filename!r}, packed in an unusual way: it is not unpacked")
                name = _safe(archive, info.filename)
                if info.is_dir():
                    yield name, None
                else:
                    with contents.open(info) as stream:
                        yield name, stream
        return
    with tarfile.open(archive, "r|*") as tar:  # as a stream: one pass, in the order of the archive
        for member in tar:
            if not (member.isfile() or member.isdir()):
                raise DataError(f"{archive} holds a link or device, {member.name!r}: it is not unpacked")
            if member.name in (".", "./"):
                continue
            name = _safe(archive, member.name)
            yield name, tar.extractfile(member) if member.isfile() else None


def _safe(archive: Path, name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    # A backslash or a colon is harmless here, but would climb or change drives elsewhere.
    if path.is_absolute() or ".." in path.parts or not path.parts or any(mark in name for mark in "\\:\0"):
        raise DataError(f"{archive} holds {name!r}, a path outside its folder: it is not unpacked")
    if not name.isprintable():  # control characters, which a terminal obeys, and bytes that are no text
        raise DataError(f"{archive} holds {name!r}, a name that cannot be shown: it is not unpacked")
    return path
