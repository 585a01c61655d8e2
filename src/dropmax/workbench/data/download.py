"""Downloading from the publishers: resumed where it stopped, verified, and unpacked."""

from __future__ import annotations

import http.client
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path

from dropmax.errors import DataError
from dropmax.workbench.data.catalogue import SOURCES, Download, data_directory, find, source_of, withdrawn
from dropmax.workbench.data.dataset import spell
from dropmax.workbench.data.labels import digest
from dropmax.workbench.data.unpacking import unpack
from dropmax.workbench.progress import progress

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
        raise DataError(
            f"could not download {source} ({error.reason}): get {', '.join(item.urls[0] for item in known.downloads)} "
            f"on a machine with a network, and put "
            + (f"them in {target / folder}" if source == "mnist" else f"it in {target}, then run this again")
        ) from error
    except OSError as error:
        raise DataError(f"could not write to {target}: {error}") from error


def download(item: Download, directory: Path) -> Path:
    """Download one file, trying its addresses in turn, and return its path once its digest is right.

    What has arrived waits in ``<file>.part``, from which a later call continues. Raises ``urllib.error.URLError`` where
    no address answers, and DataError where what arrived is not the file.
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
    """Bring ``part`` to its end, asking only for the bytes it lacks; raises ConnectionError where it breaks off."""
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
        if have and not (
            response.status == 206 and (response.headers.get("Content-Range") or "").startswith(f"bytes {have}-")
        ):
            have = 0  # a server that cannot resume sends everything
        length = response.headers.get("Content-Length")
        total = have + int(length) if length and length.isdigit() else item.size
        with (
            open(part, "ab" if have else "wb") as out,
            progress(f"downloading {item.file}", total, "bytes", have) as advance,
        ):
            while block := response.read(_BLOCK):
                out.write(block)
                have += len(block)
                advance(len(block))
                if item.size is not None and have > item.size:
                    return  # longer than it should be: stop here, and let the digest say so
    if total is not None and have < total:
        raise ConnectionError(f"the connection broke after {have:,} of {total:,} bytes")
