"""The overlay that lets a pod run the checkout: which folders are mounted, and when it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from devcluster.errors import Unsupported
from devcluster.overlay import KERNELS_DIR, covering, host_overlay, python_prefixes
from moe_api import names


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    python = tmp_path / "python"
    (python / "bin").mkdir(parents=True)
    environment = tmp_path / "checkout" / ".venv"
    environment.mkdir(parents=True)
    (environment / "pyvenv.cfg").write_text(f"home = {python / 'bin'}\nversion = 3.11\n")
    return tmp_path / "checkout"


def test_mounts_are_read_only_and_cover_python_and_checkout(checkout: Path) -> None:
    overlay = host_overlay("worker", checkout=checkout)
    [container] = overlay["spec"]["containers"]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert {"/usr", str(checkout), str(checkout.parent / "python")} <= set(mounts)
    assert str(checkout / ".venv") not in mounts  # the checkout's mount shows it
    assert all(mount["readOnly"] for mount in mounts.values())
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in overlay["spec"]["volumes"]}
    assert {mount["name"]: path for path, mount in mounts.items()} == paths
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert variables["PATH"].startswith(f"{checkout}/.venv/bin:")
    assert variables["PYTHONPATH"].split(":")[0] == f"{checkout}/core"


def test_cache_folder_is_the_only_writable_mount(checkout: Path, tmp_path: Path) -> None:
    overlay = host_overlay("worker", checkout=checkout, cache_folder=tmp_path / "cache")
    [container] = overlay["spec"]["containers"]
    writable = [m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")]
    assert writable == [KERNELS_DIR]
    assert KERNELS_DIR == names.KERNELS_DIR
    assert str(tmp_path / "cache") in [
        volume["hostPath"]["path"] for volume in overlay["spec"]["volumes"]
    ]


def test_python_behind_links_is_mounted_at_both_paths(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to("python")
    environment = checkout / ".venv"
    (environment / "pyvenv.cfg").write_text(f"home = {tmp_path / 'current' / 'bin'}\n")
    assert python_prefixes(environment) == [tmp_path / "current", tmp_path / "python"]


def test_closed_folder_is_refused_with_the_way_out(checkout: Path) -> None:
    checkout.chmod(0o700)
    with pytest.raises(Unsupported, match="chmod"):
        host_overlay("worker", checkout=checkout)


def test_missing_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"pyvenv\.cfg"):
        host_overlay("worker", checkout=tmp_path)


def test_covering_drops_what_lies_in_another() -> None:
    paths = [Path("/usr/lib"), Path("/usr"), Path("/usrlocal"), Path("/a/b"), Path("/a/b/c")]
    assert covering(paths) == [Path("/a/b"), Path("/usr"), Path("/usrlocal")]
