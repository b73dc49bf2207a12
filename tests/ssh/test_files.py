"""Files on a node are written whole or not at all."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.errors import CommandFailed, NodeUnreachable
from tasks.remote import Remote
from tests.ssh.conftest import LogIn, Start
from tests.ssh.sshd import poll
from tests.ssh.test_endings import in_background


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o755])
@pytest.mark.parametrize("node", ["head", "worker"])
def test_content_and_mode_are_as_given(
    node: str, mode: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    connection: Remote = request.getfixturevalue(node)
    path = tmp_path / "new folder" / "it's; $(here)\n"
    content = bytes(range(256)) * 100
    connection.put(str(path), content, mode)
    assert path.read_bytes() == content
    assert path.stat().st_mode & 0o777 == mode
    assert names(path.parent) == [path.name]


def test_a_file_of_no_bytes_is_written(head: Remote, tmp_path: Path) -> None:
    head.put(str(tmp_path / "empty"), b"")
    assert (tmp_path / "empty").read_bytes() == b""


def test_an_old_file_is_replaced_with_its_mode(head: Remote, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o644)
    head.put(str(path), b"new", 0o600)
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_running_script_keeps_its_old_file(head: Remote, tmp_path: Path) -> None:
    """Renamed over, not written into: a shell reads its script while it runs."""
    path = tmp_path / "script"
    path.write_text("old")
    with path.open() as running:
        head.put(str(path), b"new")
        assert running.read() == "old"


def test_a_folder_under_that_name_is_an_error(head: Remote, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(CommandFailed, match="cannot overwrite directory"):
        head.put(str(tmp_path / "taken"), b"x")
    assert names(tmp_path) == ["taken"]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk))
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("NO tiny disk: mounting a tmpfs needs root")
    yield disk
    subprocess.run(("umount", str(disk)), check=True)


def test_a_full_disk_leaves_the_old_file(head: Remote, tiny_disk: Path) -> None:
    path = tiny_disk / "file"
    path.write_text("old")
    with pytest.raises(CommandFailed) as caught:
        head.put(str(path), b"x" * 1_000_000)
    assert str(caught.value).startswith(f"head: cannot write {path}\n")
    assert "No space left on device" in str(caught.value)
    assert path.read_text() == "old"
    assert names(tiny_disk) == ["file"]


def test_a_lost_connection_leaves_the_old_file(start: Start, only: LogIn, tmp_path: Path) -> None:
    """And nothing aside: what arrived of the new one is removed."""
    node = start()
    connection = only(node)
    folder = tmp_path / "files"
    folder.mkdir()
    path = folder / "file"
    path.write_text("old")
    result = in_background(lambda: connection.put(str(path), b"x" * 300_000_000))
    poll(lambda: len(names(folder)) == 2, "the new file begins")
    node.stop()
    with pytest.raises(NodeUnreachable):
        result.result(30)
    poll(lambda: names(folder) == ["file"], "what arrived is removed")
    assert path.read_text() == "old"
