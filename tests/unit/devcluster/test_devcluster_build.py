"""What the binary is built from decides where it lies; which Go and packages are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from devcluster.build import kubernetes_version, source_hash
from devcluster.credentials import token_file, users
from devcluster.debian import missing_packages
from devcluster.errors import BuildFailed
from devcluster.golang import parse_version
from devcluster.node_settings import filesystem_of


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "go.mod").write_text("module x\n\nrequire (\n\tk8s.io/kubernetes v1.35.4\n)\n")
    (tmp_path / "go.sum").touch()
    (tmp_path / "main.go").write_text("package main\n")
    return tmp_path


def test_hash_changes_with_every_source_and_with_nothing_else(source: Path) -> None:
    before = source_hash(source)
    (source / "README.md").touch()
    assert source_hash(source) == before
    (source / "main.go").write_text("package main // changed\n")
    changed = source_hash(source)
    assert changed != before
    (source / "pause").mkdir()
    (source / "pause" / "main.go").touch()
    assert source_hash(source) not in (before, changed)


def test_version_is_read_from_the_module_file(source: Path) -> None:
    assert kubernetes_version(source) == "v1.35.4"
    (source / "go.mod").write_text("module x\n")
    with pytest.raises(BuildFailed, match=r"k8s\.io/kubernetes"):
        kubernetes_version(source)


@pytest.mark.parametrize(
    ("text", "version"),
    [("go version go1.26.8 linux/amd64", (1, 26)), ("go version go1.9 x", (1, 9)), ("", (0, 0))],
)
def test_go_version(text: str, version: tuple[int, int]) -> None:
    assert parse_version(text) == version


def test_only_what_is_missing_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "bridge").touch()
    assert missing_packages(True, lambda _: True, [tmp_path]) == []
    assert missing_packages(False, lambda _: False, []) == ["openssl", "util-linux"]
    lacking = missing_packages(True, lambda name: name not in ("ctr", "containerd"), [])
    assert lacking == ["containerd", "containernetworking-plugins"]


def test_each_node_has_a_user_of_its_own() -> None:
    nodes = ["node1", "node2"]
    tokens = {client: f"token-of-{client}" for client in users(nodes)}
    lines = token_file(tokens, nodes).splitlines()
    assert 'token-of-admin,admin,admin,"system:masters"' in lines
    node = "system:node:node2"
    assert f'token-of-node2,{node},{node},"system:nodes"' in lines
    assert len(lines) == len(tokens)


def test_file_system_is_that_of_the_innermost_mount() -> None:
    mountinfo = (
        "1 0 0:1 / / rw - overlay overlay rw\n"
        "2 1 0:2 / /var rw - ext4 /dev/vda rw\n"
        "3 1 0:3 / /variable rw - tmpfs tmpfs rw\n"
    )
    assert filesystem_of(Path("/srv/x"), mountinfo) == "overlay"
    assert filesystem_of(Path("/var/lib/x"), mountinfo) == "ext4"
