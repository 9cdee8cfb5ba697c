"""Where compiled kernels are kept: whose wish counts, what makes a folder new, read-only ones."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from moe_kernels.cpu import cache
from moe_kernels.cpu.cache import cache_folder, fingerprint, wanted_folder


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.py").write_text("a = 1\n")
    return folder


@pytest.fixture
def unwritable(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders in this list cannot be written, whoever runs the tests."""
    folders: list[Path] = []
    writable = cache._writable

    def answer(folder: Path) -> bool:
        return not any(folder.is_relative_to(f) for f in folders) and writable(folder)

    monkeypatch.setattr(cache, "_writable", answer)
    return folders


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MOE_KERNELS_CACHE": "/a", "NUMBA_CACHE_DIR": "/b", "HOME": "/h"}, "/a"),
        ({"NUMBA_CACHE_DIR": "/b", "XDG_CACHE_HOME": "/x"}, "/b"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/moe-kernels"),
        ({"HOME": "/h"}, "/h/.cache/moe-kernels"),
        ({}, f"{tempfile.gettempdir()}/.cache/moe-kernels"),
    ],
)
def test_the_nearest_wish_counts(environment: dict[str, str], expected: str) -> None:
    assert wanted_folder(environment) == Path(expected)


def test_any_change_of_what_compiles_is_a_new_folder(sources: Path) -> None:
    seen = {fingerprint(sources, "v1"), fingerprint(sources, "v2")}
    (sources / "one.py").write_text("a = 2\n")
    seen.add(fingerprint(sources, "v1"))
    (sources / "two.py").write_text("")
    seen.add(fingerprint(sources, "v1"))
    assert len(seen) == 4


def test_a_writable_folder_is_used_as_it_is(sources: Path, tmp_path: Path) -> None:
    wish = {"MOE_KERNELS_CACHE": str(tmp_path / "cache")}
    expected = tmp_path / "cache" / fingerprint(sources, "v")
    assert cache_folder(wish, sources, "v") == expected
    assert expected.is_dir()


def test_a_read_only_folder_serves_by_way_of_a_private_copy(
    sources: Path, tmp_path: Path, unwritable: list[Path]
) -> None:
    wish = {"MOE_KERNELS_CACHE": str(tmp_path / "cache")}
    ready = cache_folder(wish, sources, "v")
    assert ready is not None
    (ready / "kernel.nbc").write_bytes(b"code")
    unwritable.append(tmp_path / "cache")
    used = cache_folder(wish, sources, "v")
    assert used is not None
    assert used != ready
    assert (used / "kernel.nbc").read_bytes() == b"code"
    assert used.stat().st_mode & 0o077 == 0


def test_an_images_kernels_are_put_into_a_new_folder_and_replace_none(
    sources: Path, tmp_path: Path
) -> None:
    ready = tmp_path / "ready" / fingerprint(sources, "v") / "module"
    ready.mkdir(parents=True)
    (ready / "kernel.nbc").write_bytes(b"code")
    wish = {
        "MOE_KERNELS_CACHE": str(tmp_path / "cache"),
        "MOE_KERNELS_READY": str(tmp_path / "ready"),
    }
    used = cache_folder(wish, sources, "v")
    assert used is not None
    assert [path.name for path in (used / "module").iterdir()] == ["kernel.nbc"]
    (used / "module" / "kernel.nbc").write_bytes(b"compiled here")
    assert cache_folder(wish, sources, "v") == used
    assert (used / "module" / "kernel.nbc").read_bytes() == b"compiled here"


def test_without_any_folder_there_is_no_cache(
    sources: Path, tmp_path: Path, unwritable: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**names: str) -> str:
        raise OSError("read-only file system")

    unwritable.append(tmp_path)
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    assert cache_folder({"HOME": str(tmp_path)}, sources, "v") is None


def test_a_second_process_loads_the_very_same_kernel(tmp_path: Path) -> None:
    """And not another one of the folder, as numba would do with closures."""
    code = """
import torch
from moe_kernels.cpu.norm_rope import norm_rows, rms_norm
x = torch.randn(3, 37, generator=torch.Generator().manual_seed(1))
print(rms_norm(x, torch.ones(37), 1e-5).view(torch.int32).tolist())
print(sum(norm_rows.stats.cache_hits.values()), sum(norm_rows.stats.cache_misses.values()))
"""
    root = str(Path(cache.__file__).parents[2])
    environment = {**os.environ, "MOE_KERNELS_CACHE": str(tmp_path), "PYTHONPATH": root}

    def run() -> list[str]:
        command = [sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    first, second = run(), run()
    assert first[1] == "0 1"
    assert second == [first[0], "1 0"]
