"""Figures of several rounds become lines: best and worst, ratios of the best, goals, floors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from bench import engine
from bench.engine import logit_differences, parser
from bench.engines import comparison, floor, random_model, rounds, table, workload
from bench.engines.comparison import Line, Versus
from bench.engines.floor import Sizes
from bench.engines.rounds import ENGINES, Measured
from bench.engines.workload import Figure, Task
from moe_worker.model.config import load_architecture
from tests.support.random_checkpoint import write_random_checkpoint

KV_BYTES = {"bf16": 8192, "nvfp4": 2304}
ROOF = (
    Measured(0, "roof", Figure("roof", "read", 57.0, "GB/s")),
    Measured(0, "roof", Figure("roof", "product fp32", 184.0, "GFLOP/s")),
    Measured(0, "roof", Figure("roof", "product bf16", 434.0, "GFLOP/s")),
)


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> Sizes:
    path = random_model.write_config(tmp_path_factory.mktemp("model"))
    return floor.sizes(load_architecture(path), 2)


def figure(engine: str, row: str, variant: str, value: float, unit: str = "tok/s") -> Measured:
    touched = {"touched": 4.0} if engine == "ours" else {}
    return Measured(0, engine, Figure(row, variant, value, unit, value, touched))


def lines_of(sizes: Sizes, *measured: Measured) -> list[Line]:
    return comparison.lines([*ROOF, *measured], sizes, KV_BYTES, fastest=False)


def test_the_random_model_has_111_million_parameters() -> None:
    count = sum(math.prod(shape) for shape in random_model.shapes().values())
    assert count == pytest.approx(111.3e6, rel=1e-3)


def test_floors_are_those_worked_out_by_hand(sizes: Sizes) -> None:
    attention = 8 * (1024 * 512 + 512 * 512)
    assert sizes.shared_bytes == 2 * (attention + 8 * 32 * 512 + 4096 * 512)
    assert sizes.bytes_per_expert == 2 * 3 * 512 * 256
    assert floor.touched_by_chance(sizes, 1) == 4.0
    assert floor.touched_by_chance(sizes, 4) == pytest.approx(13.2, abs=0.1)
    assert floor.decode_bytes(sizes, 4.0, 100, 2304) == (
        sizes.shared_bytes + 8 * 4 * sizes.bytes_per_expert + 230_400
    )
    experts = 8 * 4 * 3 * 512 * 256
    products = 2 * 512 * (attention + 8 * 32 * 512 + 4096 * 512 + experts)
    assert floor.prefill_operations(sizes, 512) == products + 2 * 512 * 512 * 8 * 8 * 64


def test_rates_compare_best_rounds_and_goals_are_judged(sizes: Sizes) -> None:
    (line,) = lines_of(
        sizes,
        figure("ours", "decode-4", "nvfp4", 900.0),
        figure("ours", "decode-4", "nvfp4", 1000.0),
        figure("transformers", "decode-4", "bf16", 100.0),
        figure("transformers", "decode-4", "fp32", 200.0),
        figure("llama", "decode-4", "bf16", 1000.0),
    )
    assert line.ours is not None
    assert (line.ours.best, line.ours.worst, line.ours.touched) == (1000.0, 900.0, 4.0)
    hf, llama = line.others["transformers"], line.others["llama"]
    assert isinstance(hf, Versus)
    assert isinstance(llama, Versus)
    assert (hf.other.variant, hf.ratio, hf.goal, hf.is_reached) == ("fp32", 5.0, 4.5, True)
    assert (llama.ratio, llama.goal, llama.is_reached) == (1.0, 1.2, False)
    assert line.floor == pytest.approx(4 * 57e9 / floor.decode_bytes(sizes, 4.0, 128, 2304))
    assert line.floor_share == pytest.approx(1000.0 / line.floor)


def test_of_times_less_is_better(sizes: Sizes) -> None:
    bf16, nvfp4 = lines_of(
        sizes,
        figure("ours", "context", "bf16", 20.0, "ms"),
        figure("ours", "context", "nvfp4", 15.0, "ms"),
        figure("ours", "context", "nvfp4", 18.0, "ms"),
        figure("llama", "context", "f16", 36.0, "ms"),
        figure("llama", "context", "q4_0", 81.0, "ms"),
    )
    assert nvfp4.ours is not None
    assert (nvfp4.ours.best, nvfp4.ours.worst) == (15.0, 18.0)
    against = {name: found for name, found in nvfp4.others.items() if isinstance(found, Versus)}
    assert (against["llama"].other.variant, against["llama"].is_reached) == ("f16", True)
    assert (against["ours bf16"].ratio, against["ours bf16"].is_reached) == (0.75, True)
    assert "ours bf16" not in bf16.others
    assert bf16.floor is not None
    assert nvfp4.floor is not None
    assert bf16.floor > nvfp4.floor


def test_what_ours_did_not_run_is_shown_without_a_ratio(sizes: Sizes) -> None:
    (line,) = lines_of(sizes, figure("transformers", "decode-16", "bf16", 457.0))
    assert line.ours is None
    assert not isinstance(line.others["transformers"], Versus)
    assert line.floor_share is None


def test_every_kind_of_line_can_be_shown(sizes: Sizes) -> None:
    lines = lines_of(
        sizes,
        *(figure("ours", f"decode-{batch}", "nvfp4", 10.0) for batch in workload.DECODE_BATCHES),
        figure("ours", "prefill", "batchInvariant", 9.0),
        figure("ours", "prefill", "batchInvariant: false", 12.0),
        figure("ours", "context", "bf16", 2.0, "ms"),
        figure("ours", "context", "nvfp4", 1.0, "ms"),
        figure("ours", "arrivals", "nvfp4", 7.0),
        figure("ours", "ttft", "nvfp4", 7.0, "ms"),
        figure("ours", "warm-up", "cold", 7.0, "s"),
        figure("llama", "prefill", "bf16", 9.0),
    )  # fmt: skip
    shown = table.render(lines)
    assert shown.row_count == len(lines) == 11
    notes = [text.plain for text in table.below(lines, comparison.roof_of(ROOF))]
    assert any("takes 0.50 of the one with bf16 (≤0.8 ✓)" in note for note in notes)
    assert any("prefill runs at 0.75 of" in note for note in notes)


def test_differences_of_logits_are_relative_to_the_largest(tmp_path: Path) -> None:
    task = Task("model", (), 1, 0, str(tmp_path))
    wanted = np.zeros((2, 4), np.float32)
    wanted[:, 1] = 8.0
    other = wanted.copy()
    other[0, 3] = 10.0
    assert logit_differences(tmp_path) == {}
    workload.keep_logits(task, "transformers", "fp32", wanted)
    workload.keep_logits(task, "llama.cpp", "bf16", other)
    (told,) = logit_differences(tmp_path).values()
    assert told == "1.2e+00 of the largest, the likeliest token is the same in 1 of 2 prompts"


def test_engines_and_rows_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert parser().parse_args([]).engines == ENGINES
    chosen = parser().parse_args(["--engines", "ours,llama", "--rows", "decode-1,ttft"])
    assert (chosen.engines, chosen.rows) == (("ours", "llama"), ("decode-1", "ttft"))
    with pytest.raises(SystemExit):
        parser().parse_args(["--rows", "decode-3"])
    assert "'decode-3': must be some of decode-1," in capsys.readouterr().err


def test_the_table_is_of_the_model_that_was_made_for_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = [
        *ROOF,
        Measured(0, "ours", Figure("decode-1", "nvfp4", 200.0, "tok/s", details={"touched": 4.0})),
        figure("transformers", "decode-1", "bf16", 50.0),
    ]
    monkeypatch.setattr(rounds, "run", lambda *given: measured)
    monkeypatch.setattr(random_model, "write", write_random_checkpoint)
    result = tmp_path / "result.json"
    assert engine.main(["--engines", "ours", "--rows", "decode-1", "--json", str(result)]) == 0
    told = capsys.readouterr().out
    assert "200" in told
    assert "floor: bytes" in told
    assert json.loads(result.read_text())["figures"]
