"""Container images without a registry: one layer of empty folders, imported into each node.

A pod sees the host's programs through read-only mounts (`devcluster.overlay`); the image only has
to hold the folders to mount them on, and the links that a merged /usr needs.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HOST_IMAGE = "moe.test/host:1"
SAME_HOST_IMAGE = "moe.test/host:2"
"""The same under another name, for who wants to change an image."""
PAUSE_IMAGE = "moe.test/pause:1"
HOST_FOLDERS = ("dev", "etc", "opt", "proc", "root", "run", "sys", "tmp", "usr", "var", "var/tmp")
# What a merged /usr has links for; others are there on some machines only.
MERGED = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Entry:
    """One thing in an image's layer: a folder, a link or (with content) a program."""

    path: str
    link: str | None = None
    content: bytes | None = None


def host_entries(host: Path = Path("/")) -> list[Entry]:
    """The layer of the image whose pods use the host's programs."""
    folders = [Entry(path) for path in HOST_FOLDERS]
    links = [
        Entry(name, link=str((host / name).readlink()))
        for name in MERGED
        if (host / name).is_symlink()
    ]
    # Lets programs that look up their user's name find one.
    users = b"root:x:0:0:root:/root:/bin/sh\nmoe:x:65532:65532:moe:/tmp:/bin/sh\n"
    groups = b"root:x:0:\nmoe:x:65532:\n"
    return [
        *folders,
        *links,
        Entry("etc/passwd", content=users),
        Entry("etc/group", content=groups),
    ]


def pause_entries(program: Path) -> list[Entry]:
    """The layer of the image that holds a pod's namespaces open."""
    return [Entry("pause", content=program.read_bytes())]


def archive(tags: Sequence[str], entries: Sequence[Entry], command: Sequence[str]) -> bytes:
    """Return a docker archive with one image; the same input gives the same bytes."""
    layer = _layer(entries)
    layer_digest = hashlib.sha256(layer).hexdigest()
    machine = platform.machine()
    config = json.dumps(
        {
            "architecture": ARCHITECTURES.get(machine, machine),
            "os": "linux",
            "config": {"Cmd": list(command), "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
            "history": [],
        }
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    layer_name = f"{layer_digest}/layer.tar"
    manifest = [{"Config": config_name, "RepoTags": list(tags), "Layers": [layer_name]}]
    files = {
        layer_name: layer,
        config_name: config,
        "manifest.json": json.dumps(manifest).encode(),
    }
    return _tar([(tarfile.TarInfo(name), content) for name, content in files.items()])


def _layer(entries: Sequence[Entry]) -> bytes:
    members = []
    for entry in entries:
        member = tarfile.TarInfo(entry.path)
        member.mode = 0o755
        if entry.link is not None:
            member.type, member.linkname = tarfile.SYMTYPE, entry.link
        elif entry.content is None:
            member.type = tarfile.DIRTYPE
        if entry.path in ("tmp", "var/tmp"):
            member.mode = 0o1777
        members.append((member, entry.content or b""))
    return _tar(members)


def _tar(members: Sequence[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
