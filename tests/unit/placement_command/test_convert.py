"""`moe-plan convert`: from every format to every format, and what a format can not say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from moe_api.plan import GroupPlan
from moe_api.status import MAX_RANKS
from moe_placement.command import plan_formats
from moe_placement.command.plan_files import read_plan
from tests.support.moe_plan import moe_plan, refused

SLOTS = np.array([[[0, 1], [2, 0]], [[2, 1], [0, 1]]], dtype=np.int32)
FRACTIONS = np.array([[[0.25, 1], [1, 0.75]], [[1, 0.5], [1, 0.5]]])


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.npz"
    np.savez(path, slots=SLOTS, fractions=FRACTIONS)
    return path


def slots(path: Path) -> list[list[list[int]]]:
    found: list[list[list[int]]] = read_plan("PLAN", path, 2).placement.slots_LRS.tolist()
    return found


def test_there_and_back(plan: Path, tmp_path: Path) -> None:
    for name in ("plan.json", "plan.yaml"):
        assert moe_plan("convert", plan, tmp_path / name).code == 0
        assert moe_plan("convert", tmp_path / name, tmp_path / "back.npz").code == 0
        with np.load(tmp_path / "back.npz") as archive:
            assert np.array_equal(archive["slots"], SLOTS)
            assert np.abs(archive["fractions"] - FRACTIONS).max() < 1 / 65535


def test_a_group_plan_is_one_that_workers_read(plan: Path, tmp_path: Path) -> None:
    moe_plan("convert", plan, tmp_path / "plan.json")
    found = GroupPlan.from_json((tmp_path / "plan.json").read_bytes())
    assert [member.id for member in found.members] == [0, 1]
    assert found.slots().tolist() == SLOTS.tolist()


def test_members_and_the_next_epoch_come_from_the_plan_in_force(plan: Path, tmp_path: Path) -> None:
    moe_plan("convert", plan, tmp_path / "first.json", "--first-layer", 3)
    done = moe_plan("convert", plan, tmp_path / "next.json", "--like", tmp_path / "first.json")
    assert done.code == 0
    first = GroupPlan.from_json((tmp_path / "first.json").read_bytes())
    following = GroupPlan.from_json((tmp_path / "next.json").read_bytes())
    assert following.epoch == first.epoch + 1
    assert following.members == first.members
    assert [layer.layer for layer in following.layers] == [3, 4]
    assert following.previous is not None
    assert following.previous.layers == first.layers
    assert following.hash == following.content_hash()


def test_a_document_stays_as_it_is_in_another_notation(plan: Path, tmp_path: Path) -> None:
    moe_plan("convert", plan, tmp_path / "a.json")
    moe_plan("convert", tmp_path / "a.json", tmp_path / "b.yaml")
    document = yaml.safe_load((tmp_path / "b.yaml").read_text())
    assert document == json.loads((tmp_path / "a.json").read_text())


def test_a_table_for_tensorrt_llm(plan: Path, tmp_path: Path) -> None:
    path = tmp_path / "balancer.yaml"
    done = moe_plan("convert", plan, path, "--to", "trtllm", "--first-layer", 3)
    assert done == (0, "", "trtllm has no fractions: the engine splits evenly\n")
    assert yaml.safe_load(path.read_text()) == {
        "initial_global_assignments": {3: [0, 1, 2, 0], 4: [2, 1, 0, 1]},
        "num_slots": 4,
        "layer_updates_per_iter": 0,
    }
    assert moe_plan("convert", path, tmp_path / "back.npz", "--ranks", 2).code == 0
    assert slots(tmp_path / "back.npz") == SLOTS.tolist()


def test_a_table_for_sglang(plan: Path, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    assert moe_plan("convert", plan, path, "--to", "physical-to-logical").code == 0
    assert json.loads(path.read_text()) == {"physical_to_logical_map": [[0, 1, 2, 0], [2, 1, 0, 1]]}


def test_second_copies_on_a_rank_stay(tmp_path: Path) -> None:
    np.savez(tmp_path / "twins.npz", slots=[[[0, 0], [1, 0]]])
    path = tmp_path / "map.json"
    assert (
        moe_plan("convert", tmp_path / "twins.npz", path, "--to", "physical-to-logical").code == 0
    )
    assert json.loads(path.read_text()) == {"physical_to_logical_map": [[0, 0, 1, 0]]}


@pytest.mark.parametrize("to", ["trtllm", "physical-to-logical"])
def test_a_free_slot_that_a_table_can_not_say(tmp_path: Path, to: str) -> None:
    np.savez(tmp_path / "plan.npz", slots=[[[0, -1], [1, 2]]])
    path = tmp_path / ("out.yaml" if to == "trtllm" else "out.json")
    done = moe_plan("convert", tmp_path / "plan.npz", path, "--to", to)
    refused(done, "--to", "layer 0, rank 0, slot 1 is free")
    assert not path.exists()


def test_members_that_do_not_fit(plan: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "three.npz", slots=[[[0], [1], [2]]])
    moe_plan("convert", plan, tmp_path / "two.json")
    done = moe_plan(
        "convert", tmp_path / "three.npz", tmp_path / "o.json", "--like", tmp_path / "two.json"
    )
    refused(done, "--like", "2 members for 3 ranks")


def test_a_like_without_members(plan: Path, tmp_path: Path) -> None:
    done = moe_plan("convert", plan, tmp_path / "o.json", "--like", plan)
    refused(done, "--like", "no members")


def test_more_ranks_than_a_group_plan_has(tmp_path: Path) -> None:
    assert plan_formats.MAX_MEMBERS == MAX_RANKS
    np.savez(tmp_path / "plan.npz", slots=np.arange(1025).reshape(1, 1025, 1))
    refused(moe_plan("convert", tmp_path / "plan.npz", tmp_path / "o.json"), "at most 1024", "1025")


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("plan.txt", ".json or .yaml"),
        ("plan", ".json or .yaml"),
        ("nowhere/plan.npz", "does not exist"),
        ("folder.npz", "is a folder"),
    ],
)
def test_outputs_that_can_not_be(plan: Path, tmp_path: Path, output: str, words: str) -> None:
    (tmp_path / "folder.npz").mkdir()
    refused(moe_plan("convert", plan, tmp_path / output), "OUTPUT", words)


def test_a_format_that_contradicts_the_suffix(plan: Path, tmp_path: Path) -> None:
    refused(moe_plan("convert", plan, tmp_path / "p.npz", "--to", "trtllm"), "OUTPUT", ".yaml")
    refused(moe_plan("convert", plan, tmp_path / "p.npz", "--to", "xml"), "--to", "'xml'", "npz")


def test_an_interrupted_write_leaves_the_old_file(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.npz"
    target.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    refused(moe_plan("convert", plan, target), "OUTPUT", "No space left on device")
    assert target.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.npz", "plan.npz"]
