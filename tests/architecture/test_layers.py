"""The walls of the house: source roots, layers, and what each half may import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("core", "operator", "worker", "kernels")
PACKAGES = ("moe_api", "moe_placement", "moe_operator", "moe_worker", "moe_kernels")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT
    )


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_source_roots_are_not_packages(root: str) -> None:
    assert not (ROOT / root / "__init__.py").exists(), (
        f"{root}/ is a source root; as a package, operator/ would shadow the standard library's"
    )


def test_operator_is_still_the_standard_librarys() -> None:
    done = python("import operator; print(operator.itemgetter(0)([7]))")
    assert done.stdout.strip() == "7", done.stderr


def test_layers_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


def modules(package: str) -> list[str]:
    folder = next(
        ROOT / root / package for root in SOURCE_ROOTS if (ROOT / root / package).is_dir()
    )
    names = [
        ".".join(path.relative_to(folder.parent).with_suffix("").parts)
        for path in sorted(folder.rglob("*.py"))
        if path.name != "__main__.py"
    ]
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("moe_operator", ("torch",)),
        ("moe_placement", ("torch", "scipy", "kopf", "kubernetes")),
        ("moe_api", ("torch", "kopf", "kubernetes")),
        ("moe_worker", ("kopf", "kubernetes", "transformers")),
        ("moe_kernels", ("kopf", "kubernetes", "transformers")),
    ],
)
def test_every_module_imports_without_the_other_half(
    package: str, forbidden: tuple[str, ...]
) -> None:
    blocked = "\n".join(f"sys.modules[{name!r}] = None" for name in forbidden)
    imports = "\n".join(f"importlib.import_module({name!r})" for name in modules(package))
    done = python(f"import importlib, sys\n{blocked}\n{imports}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("library", "package", "only"),
    [("kopf", "moe_operator", {"main.py"}), ("kubernetes", "moe_operator", {"cluster.py"})],
)
def test_a_library_has_one_door(library: str, package: str, only: set[str]) -> None:
    users = {
        path.name
        for path in (ROOT / "operator" / package).rglob("*.py")
        for line in path.read_text().splitlines()
        if line.strip().startswith((f"import {library}", f"from {library}"))
    }
    assert users <= only


def test_generated_crds_equal_the_generators_output() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moe_api.crd", "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        assert path.read_bytes() == (ROOT / "charts/moe-operator/files" / path.name).read_bytes()


def test_no_package_registry_address_and_no_machine_path_in_the_repository() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout
    forbidden = ("pypi." + "org", "files.python" + "hosted", "proxy.golang" + ".org",
                 "registry.npmjs" + ".org", "deb.debian" + ".org")  # fmt: skip
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if not path.is_file() or path.suffix in (".safetensors", ".npz"):
            continue
        text = path.read_text(errors="replace")
        for word in forbidden:
            assert word not in text, f"{name} names {word}"
