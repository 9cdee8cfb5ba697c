"""The image archive: one layer with the folders, links and users that a pod needs."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

from devcluster.images import Entry, archive, host_entries


def _members(content: bytes) -> dict[str, tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        found = {}
        for member in tar.getmembers():
            file = tar.extractfile(member) if member.isfile() else None
            found[member.name] = (member, file.read() if file else b"")
        return found


def test_archive_names_its_layer_by_its_digest() -> None:
    files = _members(archive(("moe.test/x:1",), [Entry("usr")], ["/bin/sh"]))
    [image] = json.loads(files["manifest.json"][1])
    assert image["RepoTags"] == ["moe.test/x:1"]
    [layer_name] = image["Layers"]
    config = json.loads(files[image["Config"]][1])
    digest = hashlib.sha256(files[layer_name][1]).hexdigest()
    assert config["rootfs"]["diff_ids"] == [f"sha256:{digest}"]
    assert config["config"]["Cmd"] == ["/bin/sh"]
    assert image["Config"] == hashlib.sha256(files[image["Config"]][1]).hexdigest() + ".json"


def test_same_input_gives_same_bytes() -> None:
    entries = [Entry("a"), Entry("b", link="a"), Entry("c", content=b"x")]
    assert archive(("t:1",), entries, []) == archive(("t:1",), entries, [])


def test_layer_holds_folders_links_and_programs() -> None:
    entries = [Entry("tmp"), Entry("bin", link="usr/bin"), Entry("pause", content=b"\x7fELF")]
    files = _members(archive(("t:1",), entries, []))
    layer = _members(next(data for name, (_, data) in files.items() if name.endswith("layer.tar")))
    assert layer["tmp"][0].isdir()
    assert layer["tmp"][0].mode == 0o1777
    assert layer["bin"][0].linkname == "usr/bin"
    assert layer["pause"][1] == b"\x7fELF"
    assert layer["pause"][0].mode == 0o755


def test_host_image_follows_the_hosts_merged_usr(tmp_path: Path) -> None:
    (tmp_path / "bin").symlink_to("usr/bin")
    (tmp_path / "lib").mkdir()
    entries = {entry.path: entry for entry in host_entries(tmp_path)}
    assert entries["bin"].link == "usr/bin"
    assert "lib" not in entries
    assert entries["usr"].link is None
    assert b"65532" in (entries["etc/passwd"].content or b"")
