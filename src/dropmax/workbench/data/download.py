"""Downloads from the publishers: resumed where they stopped, verified, and unpacked with nothing outside the target."""

from __future__ import annotations

import http.client
import os
import shutil
import ssl
import stat
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from dropmax.errors import DataError
from dropmax.workbench.data.catalogue import SOURCES, Download, data_directory, find, source_of, withdrawn
from dropmax.workbench.data.dataset import spell
from dropmax.workbench.data.labels import digest
from dropmax.workbench.terminal import progress

_BLOCK = 1 << 18
_TIMEOUT = 30  # seconds without a byte
_BROKEN = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError)
_ATTEMPTS = 3  # an address whose connection breaks is asked again for the rest


def fetch(name: str, data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Download a data set into ``data_dir``, verify it and unpack it; returns its folder. What is there stays.

    >>> fetch("mnist-1k")
    Traceback (most recent call last):
    dropmax.errors.DataError: mnist-1k is inside the package: there is nothing to fetch
    """
    source = source_of(name)
    if source is None:
        raise DataError(f"{name} is inside the package: there is nothing to fetch")
    target, known = data_directory(data_dir), SOURCES[source]
    found, missing = find(source, target)
    if found is not None and not missing:
        return found
    if not known.downloads:
        raise DataError(withdrawn(source, target))
    folder = known.folders[0]
    try:
        if source == "mnist":
            (target / folder).mkdir(parents=True, exist_ok=True)
            for item in known.downloads:
                if item.file in missing:
                    download(item, target / folder)
            return target / folder
        if (target / folder).exists():
            raise DataError(
                f"{target / folder} is there but lacks {spell(missing)}: move it elsewhere, and fetch {source} again"
            )
        target.mkdir(parents=True, exist_ok=True)
        (item,) = known.downloads
        by_hand = (target / item.file).exists()
        archive = download(item, target)
        unpacked = unpack(archive, folder, target, known.unpacked_limit)
        if not by_hand:
            archive.unlink()
        return unpacked
    except urllib.error.URLError as error:
        urls = ", ".join(item.urls[0] for item in known.downloads)
        put = f"them in {target / folder}" if source == "mnist" else f"it in {target}, then run this again"
        raise DataError(
            f"could not download {source} ({error.reason}): get {urls} on a machine with a network, and put {put}"
        ) from error
    except OSError as error:
        raise DataError(f"could not write to {target}: {error}") from error


def download(item: Download, directory: Path) -> Path:
    """Download one file, trying its addresses in turn, and return its path once its digest is right.

    What has arrived waits in ``<file>.part``, from which a later call continues. A URLError says that no address
    answers, a DataError that what arrived is not the file.
    """
    final, part = directory / item.file, directory / f"{item.file}.part"
    algorithm, _, wanted = item.digest.partition(":")
    if final.exists():
        found = digest(final, algorithm)
        if found != wanted:
            raise DataError(f"{final} is not the publisher's file ({algorithm} {found}): remove it and try again")
        return final
    problem: Exception = DataError(f"{item.file} has no address to download it from")
    for url in item.urls:
        for _ in range(_ATTEMPTS):
            try:
                _receive(url, part, item)
            except _BROKEN as error:
                problem = error if isinstance(error, urllib.error.URLError) else urllib.error.URLError(str(error))
                if isinstance(error, urllib.error.HTTPError):
                    break  # the server has spoken: asking again will not help
                continue
            found = digest(part, algorithm)
            if found == wanted:
                os.replace(part, final)
                return final
            part.unlink()
            problem = DataError(
                f"{url} gave a file with {algorithm} {found}, not {wanted}: it was removed; try again later"
            )
            break
    raise problem


def _receive(url: str, part: Path, item: Download) -> None:
    """Bring ``part`` to its end, asking only for the bytes it lacks; raise ConnectionError where it breaks off."""
    have = part.stat().st_size if part.exists() else 0
    if item.size is not None and have >= item.size:
        return  # all there, or too much: the digest decides
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing beyond what we have: the digest decides
            return
        raise
    with response:
        resumed = (response.headers.get("Content-Range") or "").startswith(f"bytes {have}-")
        if response.status != 206 or not resumed:
            have = 0  # a server that cannot resume sends everything
        length = response.headers.get("Content-Length")
        total = have + int(length) if length and length.isdigit() else item.size
        shown = progress(f"downloading {item.file}", total, "bytes", have)
        with open(part, "ab" if have else "wb") as out, shown as advance:
            while block := response.read(_BLOCK):
                out.write(block)
                have += len(block)
                advance(len(block))
                if item.size is not None and have > item.size:
                    return  # longer than it should be: stop here, and let the digest say so
    if total is not None and have < total:
        raise ConnectionError(f"the connection broke after {have:,} of {total:,} bytes")


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
                if name.parts[0] != folder:
                    continue
                place = Path(temporary, *name.parts)
                (place if stream is None else place.parent).mkdir(parents=True, exist_ok=True)
                if stream is None:
                    continue
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
                if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
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
