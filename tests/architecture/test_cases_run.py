"""Acceptance cases of the KV cache are tests by name, and none of them may be skipped: a case whose
test never ran was one of the public reports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CASES = ("d01", "d04", "d06", "d07", "d08", "d09", "d10")
_SKIPS = {"skip", "skipif", "xfail", "importorskip"}


def case_files() -> dict[Path, set[str]]:
    """Files with tests of these cases, and which."""
    pattern = re.compile(r"def test_(d\d\d)_")
    found = {path: set(pattern.findall(path.read_text())) for path in TESTS.rglob("test_*.py")}
    return {path: cases & set(CASES) for path, cases in found.items() if cases & set(CASES)}


def skips(tree: ast.AST) -> Iterator[int]:
    """Lines on which a test could be skipped or allowed to fail."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _SKIPS:
            yield node.lineno


@pytest.mark.parametrize("case", CASES)
def test_a_case_has_a_test(case: str) -> None:
    assert any(case in cases for cases in case_files().values())


def test_no_file_with_a_case_skips_anything() -> None:
    for path in case_files():
        lines = list(skips(ast.parse(path.read_text())))
        assert not lines, f"{path.relative_to(TESTS)}: lines {lines}"


@pytest.mark.parametrize(
    "source",
    ["@pytest.mark.skipif(True)\ndef f(): ...", "pytest.skip('no')", "pytest.importorskip('x')"],
)
def test_a_skip_would_be_seen(source: str) -> None:
    assert list(skips(ast.parse(source)))
