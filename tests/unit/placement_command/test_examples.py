"""Every command line that `--help` and docs/moe-plan.md show does what it says."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from moe_placement.command import main
from tests.support.moe_plan import moe_plan

ROOT = Path(__file__).resolve().parents[3]
LAYERS, EXPERTS, RANKS, SLOTS = 4, 256, 32, 9
HELP = [
    line.partition("    (")[0].strip()
    for examples in (main.EXAMPLES, *(module.EXAMPLES for module in main.COMMANDS))
    for line in examples.replace("\\\n", "").splitlines()
    if line.strip().startswith("moe-plan ") and "COMMAND" not in line
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the examples name."""
    folder = tmp_path_factory.mktemp("examples")
    rng = np.random.default_rng(4)
    windows = rng.lognormal(0, 1, (4, LAYERS, EXPERTS)) * 100
    np.save(folder / "L.npy", windows[0])
    np.save(folder / "trace.npy", windows)
    counts = {name: rng.integers(1, 100, (3, 64)).tolist() for name in ("law", "code")}
    (folder / "counts.json").write_text(json.dumps({"counts": counts}))
    sized = ["--ranks", RANKS, "--slots-per-rank", SLOTS]
    for name, seed in (("P", 0), ("before", 0), ("after", 1)):
        np.save(folder / "other.npy", windows[seed])
        output = folder / f"{name}.npz"
        assert (
            moe_plan("plan", "--load", folder / "other.npy", *sized, "--output", output).code == 0
        )
    for name in ("in-force.json", "xp.json"):
        assert moe_plan("convert", folder / "P.npz", folder / name).code == 0
    reports = [
        {
            "schema": 1, "incarnation": "i", "member": member, "generation": 1, "epoch": 1,
            "monotonicSeconds": 1, "routed": rng.integers(0, 99, (LAYERS, EXPERTS)).tolist(),
            "served": [],
        }
        for member in range(3)
    ]  # fmt: skip
    (folder / "reports.json").write_text(json.dumps(reports))
    routing = {name: rng.integers(0, 64, (4096, 3, 2), dtype=np.uint8) for name in ("law", "code")}
    lengths = {f"{name}_doc_lengths": [4096] for name in routing}
    np.savez(folder / "routing.npz", **routing, **lengths)
    table = {"physical_to_logical_map": rng.integers(0, 256, (2, RANKS * SLOTS)).tolist()}
    (folder / "map.json").write_text(json.dumps(table))
    return folder


@pytest.mark.parametrize("line", sorted(set(HELP)))
def test_an_example_of_the_help(world: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    done = moe_plan(*shlex.split(line)[1:])
    assert (done.code, done.err.count("Traceback")) == (0, 0), done.err


def test_the_examples_of_the_page_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are run where the page says: in the repository, with outputs put aside."""
    page = (ROOT / "docs/moe-plan.md").read_text()
    lines = [line[2:] for line in page.splitlines() if line.startswith("$ moe-plan ")]
    assert len(lines) >= len(main.COMMANDS)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    for line in lines:
        done = moe_plan(*shlex.split(line)[1:])
        assert done.code == 0, (line, done.err)
