"""The commands that docs and scripts tell to run do run, from the repository's folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"\bpython3? ((?:-m bench\.\w+)|(?:bench/\w+\.py))")
TEXTS = (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.py"))
COMMANDS = sorted({found for text in TEXTS for found in COMMAND.findall(text.read_text())})


def test_there_are_commands() -> None:
    assert "-m bench.kv_formats" in COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_script_starts(command: str) -> None:
    ended = subprocess.run(
        [sys.executable, *command.split(), "--help"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "usage:" in ended.stdout
