"""The cluster's one binary: built from the Go sources beside this file, kept in the user's cache.

The cache's folder is named after the Kubernetes version and a hash of the sources, and appears at
once when all of it is there: whoever sees the folder can use it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from devcluster import golang
from devcluster.errors import BuildFailed
from devcluster.lock import locked
from devcluster.progress import Say

SOURCE = Path(__file__).resolve().parent
CHECKOUT = SOURCE.parent
BUILD_SECONDS = 3600
REPORT_SECONDS = 20


@dataclass(frozen=True)
class Binaries:
    """Where the built programs lie."""

    folder: Path

    @property
    def kube(self) -> Path:
        """The binary that is every component; the first argument says which."""
        return self.folder / "kube"

    @property
    def pause(self) -> Path:
        return self.folder / "pause"

    @property
    def bin(self) -> Path:
        """A folder for PATH with `kubectl` and `helm`."""
        return self.folder / "bin"


def cache_folder() -> Path:
    """The user's cache of this project."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "moe-operator"


def binaries() -> Binaries:
    """Where the binaries of the present sources lie, built or not."""
    return Binaries(cache_folder() / f"kube-{kubernetes_version(SOURCE)}-{source_hash(SOURCE)}")


def is_built() -> bool:
    return binaries().folder.is_dir()


def kubernetes_version(source: Path) -> str:
    """The version of Kubernetes that go.mod asks for, as "v1.35.4"."""
    text = (source / "go.mod").read_text()
    found = re.search(r"^\s*k8s\.io/kubernetes (v\d+\.\d+\.\d+)$", text, re.MULTILINE)
    if found is None:
        raise BuildFailed(f"{source / 'go.mod'} does not require k8s.io/kubernetes")
    return found[1]


def source_hash(source: Path) -> str:
    """Twelve hex digits over everything that the binary is made from."""
    digest = hashlib.sha256(platform.machine().encode())
    files = [source / "go.mod", source / "go.sum", *sorted(source.rglob("*.go"))]
    for file in files:
        digest.update(f"\0{file.relative_to(source)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def build(say: Say) -> Binaries:
    """Return the binaries, building them first when the cache lacks them.

    About 4 minutes on 2 cores with an empty Go cache. Two callers do not build twice: the second
    waits. An interrupted build leaves nothing that looks finished. Raises BuildFailed.
    """
    wanted = binaries()
    if wanted.folder.is_dir():
        return wanted
    cache = cache_folder()
    with locked(cache / "build.lock", BUILD_SECONDS, say, "another build of the cluster binary"):
        if wanted.folder.is_dir():
            return wanted
        _remove_interrupted(cache)
        go = golang.find_or_install(cache, say)
        unfinished = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
        try:
            _build_into(unfinished, go, say)
            unfinished.chmod(0o755)
            unfinished.rename(wanted.folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return wanted


def _remove_interrupted(cache: Path) -> None:
    """Called with the lock held, so nobody is at work in these."""
    for left in cache.glob("building-*"):
        shutil.rmtree(left)


def _build_into(folder: Path, go: Path, say: Say) -> None:
    version = kubernetes_version(SOURCE)
    say(f"fetching the Go modules of Kubernetes {version}")
    packages = len(_go(go, "list", "-deps", ".").splitlines())
    say(f"building the cluster binary with {go} ({packages} packages)")
    _, minor, _ = version.split(".")
    stamp = "k8s.io/component-base/version"
    flags = (
        f"-s -w -X {stamp}.gitVersion={version} -X {stamp}.gitMajor=1 -X {stamp}.gitMinor={minor}"
    )
    _compile(go, flags, folder / "kube", ".", packages, say)
    _compile(go, "-s -w", folder / "pause", "./pause", packages, say)
    (folder / "bin").mkdir()
    for name in ("kubectl", "helm"):
        (folder / "bin" / name).symlink_to(Path("..") / "kube")
    say(f"built {(folder / 'kube').stat().st_size / 1e6:.0f} MB")


def _environment() -> dict[str, str]:
    ours = {
        "CGO_ENABLED": "0",
        "GOFLAGS": "-mod=readonly -buildvcs=false",
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
    }
    return {**os.environ, **ours}


def _go(go: Path, *arguments: str) -> str:
    done = subprocess.run(
        [go, *arguments], cwd=SOURCE, env=_environment(), capture_output=True, text=True
    )
    if done.returncode != 0:
        raise BuildFailed(f"`go {' '.join(arguments)}` failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


def _compile(go: Path, flags: str, out: Path, package: str, packages: int, say: Say) -> None:
    """Run `go build`; with -v it names each package it compiles, which makes the progress."""
    argv = [str(go), "build", "-v", "-trimpath", "-ldflags", flags, "-o", str(out), package]
    said: list[str] = []
    compiled = 0
    reported = time.monotonic()
    with subprocess.Popen(
        argv, cwd=SOURCE, env=_environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                said = [*said[-19:], line]
                compiled += 1
                if time.monotonic() - reported > REPORT_SECONDS:
                    reported = time.monotonic()
                    say(f"compiled {compiled} of at most {packages} packages")
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        raise BuildFailed(f"`go build {package}` failed:\n{''.join(said)}")
