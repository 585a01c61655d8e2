from __future__ import annotations

import hashlib
import io
import shutil
import stat
import tarfile
import urllib.error
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from dropmax.errors import DataError
from dropmax.workbench.data import check, fetch
from dropmax.workbench.data.catalogue import SOURCES, Download
from dropmax.workbench.data.download import download, unpack
from tests.workbench.data.layouts import write_cifar

CONTENT = bytes(range(256)) * 4000


class Server(ThreadingHTTPServer):
    """Serves ``files`` by name; can ignore Range, break off in the middle, and remembers what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.resumes = True
        self.break_after: int | None = None
        self.asked: list[tuple[str, str | None]] = []

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name, wanted = self.path.lstrip("/"), self.headers.get("Range")
        self.server.asked.append((name, wanted))
        if name not in self.server.files:
            self.send_error(404)
            return
        content, start = self.server.files[name], 0
        if wanted and self.server.resumes:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        stop = len(content)
        if self.server.break_after is not None:
            stop = min(stop, start + self.server.break_after)
        self.wfile.write(content[start:stop])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    running = Server()
    thread = Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def item(*urls: str, content: bytes = CONTENT, size: int | None = len(CONTENT)) -> Download:
    return Download("file.bin", urls, size, f"sha256:{hashlib.sha256(content).hexdigest()}")


@pytest.mark.parametrize("size", [None, len(CONTENT)])
@pytest.mark.parametrize("have", [0, 1000, len(CONTENT)])
@pytest.mark.parametrize("resumes", [True, False])
def test_goes_on_where_it_stopped(tmp_path: Path, server: Server, size: int | None, have: int, resumes: bool) -> None:
    server.files["file.bin"], server.resumes = CONTENT, resumes
    if have:
        (tmp_path / "file.bin.part").write_bytes(CONTENT[:have])
    path = download(item(server.url("file.bin"), size=size), tmp_path)
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.bin"]
    if have < len(CONTENT):
        assert server.asked == [("file.bin", "bytes=1000-" if have else None)]
    asked = len(server.asked)
    download(item(server.url("file.bin")), tmp_path)
    assert len(server.asked) == asked  # the second time nothing is asked


def test_a_broken_connection_is_taken_up_again(tmp_path: Path, server: Server) -> None:
    server.files["file.bin"], server.break_after = CONTENT, 400_000
    assert download(item(server.url("file.bin")), tmp_path).read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked] == [None, "bytes=400000-", "bytes=800000-"]


def test_a_connection_that_keeps_breaking_leaves_what_came(tmp_path: Path, server: Server) -> None:
    server.files["file.bin"], server.break_after = CONTENT, 10_000
    with pytest.raises(urllib.error.URLError, match="broke after 30,000 of 1,024,000 bytes"):
        download(item(server.url("file.bin")), tmp_path)
    assert (tmp_path / "file.bin.part").read_bytes() == CONTENT[:30_000]


@pytest.mark.parametrize("served", [CONTENT[:-1] + b"?", CONTENT + b"more", CONTENT[:-5]])
@pytest.mark.parametrize("size", [None, len(CONTENT)])
def test_the_wrong_file_is_not_kept(tmp_path: Path, server: Server, served: bytes, size: int | None) -> None:
    server.files["file.bin"] = served
    with pytest.raises(DataError, match=r"gave a file with sha256 .*, not .*: it was removed"):
        download(item(server.url("file.bin"), size=size), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_next_address_is_tried(tmp_path: Path, server: Server) -> None:
    server.files["bad"], server.files["good"] = b"wrong", CONTENT
    urls = (server.url("absent"), server.url("bad"), server.url("good"))
    assert download(item(*urls), tmp_path).read_bytes() == CONTENT
    assert [name for name, _ in server.asked] == ["absent", "bad", "good"]


def test_a_wrong_file_already_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"file.bin is not the publisher's file .* remove it and try again"):
        download(item("http://127.0.0.1:9/"), tmp_path)


@pytest.fixture
def cifar(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A tiny CIFAR-10 that the server gives, in the place of the publisher's."""
    made = tmp_path / "made" / "cifar-10-batches-bin"
    for name in SOURCES["cifar-10"].entries[:6]:
        write_cifar(made / name, [(k,) for k in range(10)] * 3)
    (made / "batches.meta.txt").write_text("\n".join(f"thing {k}" for k in range(10)))
    name = "cifar-10-binary.tar.gz"
    content = Path(shutil.make_archive(str(tmp_path / "a"), "gztar", made.parent)).read_bytes()
    server.files[name] = content
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    publishers = Download(name, (server.url(name),), len(content), f"md5:{digest}")
    monkeypatch.setitem(SOURCES, "cifar-10", replace(SOURCES["cifar-10"], downloads=(publishers,)))
    return content


def test_fetch_downloads_verifies_and_unpacks(tmp_path: Path, server: Server, cifar: bytes) -> None:
    target, by_hand = tmp_path / "data", tmp_path / "by-hand"
    assert fetch("cifar-10", target) == target / "cifar-10-batches-bin"
    assert [path.name for path in target.iterdir()] == ["cifar-10-batches-bin"]  # and no archive
    assert {finding.status for finding in check("cifar-10", target)} == {"damaged"}  # 30 images are not 10,000
    fetch("cifar-10", target)
    by_hand.mkdir()
    (by_hand / "cifar-10-binary.tar.gz").write_bytes(cifar)  # is unpacked, and stays
    fetch("cifar-10", by_hand)
    assert sorted(path.name for path in by_hand.iterdir()) == ["cifar-10-batches-bin", "cifar-10-binary.tar.gz"]
    assert len(server.asked) == 1
    (target / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"is there but lacks data_batch_3.bin: move it elsewhere"):
        fetch("cifar-10", target)


def test_fetch_mnist_gets_only_what_is_missing(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = SOURCES["mnist"].entries
    server.files.update({name: name.encode() for name in entries})
    downloads = tuple(
        Download(name, (server.url(name),), None, f"sha256:{hashlib.sha256(name.encode()).hexdigest()}")
        for name in entries
    )
    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], downloads=downloads))
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    (tmp_path / "MNIST" / "raw" / "train-images.idx3-ubyte").write_bytes(b"")
    assert fetch("mnist-55k", tmp_path) == tmp_path / "mnist"
    assert [name for name, _ in server.asked] == list(entries[1:])
    assert sorted(path.name for path in (tmp_path / "mnist").iterdir()) == sorted(entries[1:])


@pytest.mark.parametrize("name", ["mnist", "cifar-10", "cub"])
def test_without_a_network_one_sentence_says_what_to_do(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    with pytest.raises(DataError) as caught:
        fetch(name, tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    for needed in ("Name or service not known", SOURCES[name].downloads[0].urls[0], str(tmp_path), "put"):
        assert needed in message


def test_names_that_cannot_be_fetched(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="mnist-5k is inside the package"):
        fetch("mnist-5k", tmp_path)
    with pytest.raises(DataError, match="unknown data set 'cub200': did you mean 'cub'"):
        fetch("cub200", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="could not write to"):
        fetch("mnist", tmp_path / "file")


def tar(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for info in members:
            archive.addfile(info, io.BytesIO(bytes(info.size)))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 5) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size if kind == tarfile.REGTYPE else 0
    return info


GOOD = member("set/a.bin")


@pytest.mark.parametrize("kind", ["gztar", "zip"])
def test_the_folder_and_nothing_else(tmp_path: Path, kind: str) -> None:
    (tmp_path / "made" / "set" / "sub").mkdir(parents=True)
    for name, content in {"set/a.bin": b"hello", "set/sub/b.bin": b"world", "other": b""}.items():
        (tmp_path / "made" / name).write_bytes(content)
    archive = Path(shutil.make_archive(str(tmp_path / "a"), kind, tmp_path / "made"))
    target = tmp_path / "target"
    target.mkdir()
    assert unpack(archive, "set", target, 100) == target / "set"
    assert (target / "set" / "a.bin").read_bytes() == b"hello"
    assert (target / "set" / "sub" / "b.bin").read_bytes() == b"world"
    assert [path.name for path in target.iterdir()] == ["set"]


@pytest.mark.parametrize(
    ("hostile", "says"),
    [
        (member("/etc/passwd"), "'/etc/passwd', a path outside its folder"),
        (member("set/../../evil"), "a path outside its folder"),
        (member("..\\evil"), "a path outside its folder"),
        (member("C:evil"), "a path outside its folder"),
        (member("set/link", tarfile.SYMTYPE, "/etc/passwd"), "holds a link or device, 'set/link'"),
        (member("set/hard", tarfile.LNKTYPE, "set/a.bin"), "holds a link or device"),
        (member("set/device", tarfile.CHRTYPE), "holds a link or device"),
        (member("set/pipe", tarfile.FIFOTYPE), "holds a link or device"),
        (member("set", tarfile.SYMTYPE, "/etc"), "holds a link or device, 'set'"),
        (member("set/\x1b]0;title\x07"), "a name that cannot be shown"),
        (member("outside/link", tarfile.SYMTYPE, "/etc"), "holds a link or device"),
        (member("set/big", size=2000), "unpacks to more than 1,000 bytes"),
        (member("set/a.bin"), "cannot be unpacked: .*File exists"),
    ],
)
@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_hostile_archive_is_refused_whole(tmp_path: Path, hostile: tarfile.TarInfo, says: str, kind: str) -> None:
    target = tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    if kind == "tar":
        archive = tar(tmp_path / "a.archive", GOOD, hostile)
    else:
        archive = tmp_path / "a.zip"
        modes = {tarfile.SYMTYPE: stat.S_IFLNK, tarfile.CHRTYPE: stat.S_IFCHR, tarfile.FIFOTYPE: stat.S_IFIFO}
        if hostile.type not in (tarfile.REGTYPE, *modes):
            pytest.skip("a zip has no hard links")
        info = zipfile.ZipInfo(hostile.name)
        info.external_attr = (modes.get(hostile.type, stat.S_IFREG) | 0o777) << 16
        with zipfile.ZipFile(archive, "w") as contents:
            contents.writestr("set/a.bin", "hello")
            contents.writestr(info, bytes(hostile.size))
    with pytest.raises(DataError, match=says):
        unpack(archive, "set", target, 1000)
    assert list(target.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [archive.name, "deep"]


def test_damaged_archives_and_things_in_the_way(tmp_path: Path) -> None:
    whole = tar(tmp_path / "a.tgz", member("set/a.bin", size=25_600)).read_bytes()
    for content in (whole[: len(whole) // 2], b"no archive", b"", whole[:20] + b"??" + whole[22:]):
        (tmp_path / "b.tgz").write_bytes(content)
        with pytest.raises(DataError, match=r"b.tgz (is damaged and )?cannot be unpacked"):
            unpack(tmp_path / "b.tgz", "set", tmp_path, 10**6)
    (tmp_path / "b.zip").write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"b.zip is damaged"):
        unpack(tmp_path / "b.zip", "set", tmp_path, 10**6)
    with pytest.raises(DataError, match="has no folder missing in it"):
        unpack(tmp_path / "a.tgz", "missing", tmp_path, 10**6)
    (tmp_path / "set").mkdir()
    with pytest.raises(DataError, match="is in the way"):
        unpack(tmp_path / "a.tgz", "set", tmp_path, 10**6)
