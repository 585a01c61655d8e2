from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from dropmax.errors import DataError
from dropmax.workbench.data.unpacking import unpack


def tar(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


GOOD = (member("set/a.bin"), b"hello")


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_the_folder_and_nothing_else(tmp_path: Path, kind: str) -> None:
    if kind == "tar":
        dot, folder = (member("."), b""), (member("set/sub", tarfile.DIRTYPE), b"")
        dot[0].type = tarfile.DIRTYPE
        archive = tar(
            tmp_path / "a.tgz", dot, folder, GOOD, (member("./set/sub/b.bin"), b"world"), (member("other"), b"")
        )
    else:
        archive = tmp_path / "a.zip"
        with zipfile.ZipFile(archive, "w") as contents:
            contents.writestr("set/a.bin", "hello")
            contents.writestr("set/sub/", "")
            contents.writestr("set/sub/b.bin", "world")
            contents.writestr("other", "")
    assert unpack(archive, "set", tmp_path, 100) == tmp_path / "set"
    assert (tmp_path / "set" / "a.bin").read_bytes() == b"hello"
    assert (tmp_path / "set" / "sub" / "b.bin").read_bytes() == b"world"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["set", archive.name])


@pytest.mark.parametrize(
    ("hostile", "says"),
    [
        ((member("/etc/passwd"), b"x"), "'/etc/passwd', a path outside its folder"),
        ((member("set/../../evil"), b"x"), "a path outside its folder"),
        ((member("..\\evil"), b"x"), "a path outside its folder"),
        ((member("C:evil"), b"x"), "a path outside its folder"),
        ((member("set/link", tarfile.SYMTYPE, "/etc/passwd"), b""), "holds a link or device, 'set/link'"),
        ((member("set/hard", tarfile.LNKTYPE, "set/a.bin"), b""), "holds a link or device"),
        ((member("set/device", tarfile.CHRTYPE), b""), "holds a link or device"),
        ((member("set/pipe", tarfile.FIFOTYPE), b""), "holds a link or device"),
        ((member("set", tarfile.SYMTYPE, "/etc"), b""), "holds a link or device, 'set'"),
        ((member("set/\x1b]0;title\x07"), b"x"), "a name that cannot be shown"),
        ((member("outside/link", tarfile.SYMTYPE, "/etc"), b""), "holds a link or device"),
        ((member("set/big"), bytes(2000)), "unpacks to more than 1,000 bytes"),
        ((member("set/a.bin"), b"again"), "cannot be unpacked: .*File exists"),
    ],
)
def test_a_hostile_tar_is_refused_whole(tmp_path: Path, hostile: tuple[tarfile.TarInfo, bytes], says: str) -> None:
    target = tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    archive = tar(tmp_path / "a.tar.gz", GOOD, hostile)
    with pytest.raises(DataError, match=says):
        unpack(archive, "set", target, 1000)
    assert list(target.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar.gz", "deep"]


@pytest.mark.parametrize("name", ["../evil", "/evil", "set\\..\\..\\evil", "set/link", "set/pipe"])
def test_a_hostile_zip_is_refused_whole(tmp_path: Path, name: str) -> None:
    info = zipfile.ZipInfo(name)
    if name in ("set/link", "set/pipe"):
        info.external_attr = ((stat.S_IFLNK if name == "set/link" else stat.S_IFIFO) | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as contents:
        contents.writestr("set/a.bin", "hello")
        contents.writestr(info, "/etc/passwd")
    with pytest.raises(DataError, match="not unpacked"):
        unpack(tmp_path / "a.zip", "set", tmp_path, 1000)
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


def test_damaged_archives_and_things_in_the_way(tmp_path: Path) -> None:
    whole = tar(tmp_path / "a.tgz", (member("set/a.bin"), bytes(range(256)) * 100)).read_bytes()
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
