"""Each engine of the comparison runs its rows, and all compute the same model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.engines import ours, random_model, rounds, serving, transformers_engine, workload
from bench.engines.workload import Figure, Task

ROWS = ("decode-1", "decode-4", "prefill", "logits")
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 32,
    "vocab_size": 128,
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    folder = tmp_path_factory.mktemp("comparison")
    model = random_model.write(folder / "model", **SMALL)
    return Task(str(model), ROWS, 1, 0, str(folder), kernels="reference")


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("STEPS", 6), ("PREFILLS", 2), ("PREFILL_TOKENS", 48)):
        monkeypatch.setattr(workload, name, value)
    monkeypatch.setattr(serving, "USERS", 2)
    monkeypatch.setattr(serving, "REQUESTS", 5)
    monkeypatch.setattr(serving, "NEWCOMERS", 2)
    monkeypatch.setattr(serving, "LOADED_BATCH", 2)


# The name that all versions know.
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_ours_and_transformers_run_the_same_rows_and_agree(task: Task) -> None:
    figures: dict[str, list[Figure]] = {"ours": [], "transformers": []}
    ours.measure(task, figures["ours"].append)
    transformers_engine.measure(task, figures["transformers"].append)
    for told in figures.values():
        assert {figure.row for figure in told} == {"decode-1", "decode-4", "prefill"}
        assert all(figure.value > 0 and figure.unit == "tok/s" for figure in told)
    for told in figures.values():
        of_one = [figure for figure in told if figure.row == "decode-1"]
        assert all((figure.details or {})["touched"] == 2.0 for figure in of_one)
    assert {figure.variant for figure in figures["transformers"]} == {"bf16", "fp32"}
    folder = Path(task.folder)
    wanted = np.load(workload.logits_file(folder, "transformers", "fp32"))
    got = np.load(workload.logits_file(folder, "ours", "bf16"))
    assert got.shape == wanted.shape == (workload.LOGIT_PROMPTS, SMALL["vocab_size"])
    assert np.abs(got - wanted).max() < 0.05 * np.abs(wanted).max()


def test_requests_that_come_and_go_are_measured(task: Task) -> None:
    figures: list[Figure] = []
    ours.measure(replace(task, rows=("arrivals", "ttft")), figures.append)
    arrivals, ttft = figures
    assert (arrivals.row, arrivals.unit) == ("arrivals", "tok/s")
    assert (ttft.row, ttft.unit) == ("ttft", "ms")
    assert 0 < ttft.value <= (ttft.details or {})["worst_ms"]


def test_an_engine_that_fails_says_why(task: Task) -> None:
    broken = replace(task, model=task.folder + "/no-such-model", rows=("decode-1",))
    with pytest.raises(rounds.EngineEnded, match="no-such-model"):
        list(rounds.figures("ours", broken))


def test_what_is_not_installed_is_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rounds.missing_packages("ours") == []
    monkeypatch.setitem(rounds.NEEDS, "llama", ("json", "no_such_package"))  # type: ignore[arg-type]
    assert rounds.missing_packages("llama") == ["no_such_package"]


def test_a_gguf_file_has_the_same_weights(task: Task, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the extra bench is not installed")
    from safetensors.torch import load_file

    from bench.engines import gguf_file

    path = tmp_path / "model.gguf"
    gguf_file.write(task.model_path, path)
    reader = gguf.GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    stored = load_file(task.model_path / "model.safetensors")
    assert len(found) == 3 + SMALL["num_hidden_layers"] * 12
    assert reader.fields["qwen3moe.expert_used_count"].contents() == 2

    def bits(name: str) -> np.ndarray:  # type: ignore[type-arg]
        return found[name].data.view(np.uint16)

    def wanted(name: str) -> np.ndarray:  # type: ignore[type-arg]
        return stored[name].view(torch.uint16).numpy()

    assert (bits("blk.1.attn_k.weight") == wanted("model.layers.1.self_attn.k_proj.weight")).all()
    down = wanted("model.layers.0.mlp.experts.3.down_proj.weight")
    assert (bits("blk.0.ffn_down_exps.weight")[3] == down).all()
    config = json.loads((task.model_path / "config.json").read_text())
    config["model_type"] = "mixtral"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(gguf_file.NotWritten, match="this is mixtral"):
        gguf_file.write(tmp_path, path)
