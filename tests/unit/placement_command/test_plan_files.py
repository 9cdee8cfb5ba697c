"""Plans of every format, and the one line for each file that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from moe_api.plan import encode_layers
from moe_placement.command import plan_formats
from moe_placement.command.plan_files import PlanFile, check_experts, read_plan
from moe_placement.command.plan_formats import Format
from moe_placement.command.usage import UsageError
from moe_placement.placement import Placement
from tests.support.moe_plan import moe_plan, refused

SLOTS = np.array([[[0, 1], [2, 0]], [[2, 1], [0, -1]]], dtype=np.int32)
FRACTIONS = np.array([[[0.25, 1], [1, 0.75]], [[1, 1], [1, 0]]])
PLACEMENT = Placement(SLOTS, FRACTIONS)
FULL = Placement.even(np.array([[[0, 1], [2, 0]], [[2, 1], [0, 1]]], dtype=np.int32))


def read(path: Path, num_ranks: int | None = None) -> PlanFile:
    return read_plan("PLAN", path, num_ranks)


def saved(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def group_plan(**changes: Any) -> dict[str, Any]:
    members = [
        {"id": rank, "pod": f"p{rank}", "uid": "u", "address": f"10.0.0.{rank}", "incarnation": "i"}
        for rank in range(2)
    ]
    layers = [layer.to_wire() for layer in encode_layers(SLOTS, FRACTIONS)]
    return {
        "schema": 1, "namespace": "ns", "deployment": "tiny", "group": 3, "leaderEpoch": 2,
        "generation": 5, "epoch": 9, "members": members, "layers": layers, **changes,
    }  # fmt: skip


def stored(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def encoded(path: Path, placement: Placement, to: Format) -> Path:
    return stored(path, plan_formats.encode(placement, path, to))


def equal(found: Placement, wanted: Placement, tolerance: float = 0.0) -> None:
    assert np.array_equal(found.slots_LRS, wanted.slots_LRS)
    assert np.abs(found.fractions_LRS - wanted.fractions_LRS).max() <= tolerance


def test_an_archive_comes_back_as_it_went(tmp_path: Path) -> None:
    path = encoded(tmp_path / "p.npz", PLACEMENT, Format.NPZ)
    equal(read(path).placement, PLACEMENT)
    with np.load(path, allow_pickle=False) as archive:
        assert set(archive.files) == {"slots", "fractions"}
        assert archive["slots"].dtype.kind == "i"
        assert archive["fractions"].dtype.kind == "f"


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_a_group_plan_comes_back_within_what_its_units_can_say(tmp_path: Path, suffix: str) -> None:
    path = encoded(tmp_path / f"p{suffix}", PLACEMENT, Format.GROUP_PLAN)
    found = read(path)
    equal(found.placement, PLACEMENT, 1 / 65535)
    assert found.document is not None
    assert found.document.hash == found.document.content_hash()


@pytest.mark.parametrize(
    ("name", "to"),
    [("p.yaml", Format.TRTLLM), ("p.json", Format.PHYSICAL_TO_LOGICAL)],
)
def test_tables_of_other_engines_come_back(tmp_path: Path, name: str, to: Format) -> None:
    equal(read(encoded(tmp_path / name, FULL, to), 2).placement, FULL)


def test_slots_alone_are_split_evenly(tmp_path: Path) -> None:
    np.save(tmp_path / "p.npy", SLOTS)
    equal(read(tmp_path / "p.npy").placement, Placement.even(SLOTS))
    equal(read(saved(tmp_path / "p.npz", slots=SLOTS)).placement, Placement.even(SLOTS))


def test_an_object_as_kubectl_prints_it(tmp_path: Path) -> None:
    stored_object = {
        "apiVersion": "moe-operator.dev/v1alpha1",
        "kind": "ExpertPlacement",
        "metadata": {"name": "tiny-g3"},
        "spec": group_plan(),
        "status": {"appliedEpoch": 9},
    }
    listed = {"apiVersion": "v1", "kind": "List", "items": [stored_object]}
    for name, document in (("a.json", stored_object), ("b.json", listed), ("c.json", group_plan())):
        path = stored(tmp_path / name, json.dumps(document).encode())
        equal(read(path).placement, PLACEMENT, 1 / 65535)
    path = stored(tmp_path / "d.yaml", yaml.safe_dump(stored_object).encode())
    found = read(path)
    assert found.document is not None
    assert found.document.epoch == 9


def test_second_copies_on_a_rank_become_one(tmp_path: Path) -> None:
    slots = np.array([[[0, 0, 0], [1, 0, 1]]])
    found = read(saved(tmp_path / "p.npz", slots=slots))
    assert found.twins == 3
    assert found.placement.slots_LRS.tolist() == [[[0, -1, -1], [1, 0, -1]]]
    assert found.placement.fractions_LRS.tolist() == [[[0.75, 0, 0], [1, 0.25, 0]]]


ARCHIVES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "two dimensions": ({"slots": SLOTS[0]}, ("(2, 2)", "[layers, ranks, slots]")),
    "no layer": ({"slots": SLOTS[:0]}, ("(0, 2, 2)",)),
    "half an expert": ({"slots": SLOTS + 0.5}, ("slots[0, 0, 0] is 0.5", "whole numbers")),
    "NaN": ({"slots": np.where(SLOTS == 2, np.nan, SLOTS)}, ("slots[0, 1, 0] is nan",)),
    "below -1": ({"slots": SLOTS - 1}, ("layer 1, rank 1, slot 1 is -2", "-1 for a free slot")),
    "nothing in a layer": ({"slots": np.where([[[False]], [[True]]], -1, SLOTS)}, ("layer 1",)),
    "fractions of another shape": (
        {"slots": SLOTS, "fractions": FRACTIONS[:, :1]},
        ("(2, 1, 2)", "(2, 2, 2)"),
    ),
    "a negative fraction": (
        {"slots": SLOTS, "fractions": FRACTIONS - [[[0.5]], [[0]]]},
        ("layer 0, rank 0, slot 0 has fraction -0.25",),
    ),
    "a fraction that is NaN": (
        {"slots": SLOTS, "fractions": FRACTIONS * np.nan},
        ("fraction nan",),
    ),
    "a fraction in a free slot": (
        {"slots": SLOTS, "fractions": np.where(SLOTS < 0, 0.5, FRACTIONS)},
        ("layer 1, rank 1, slot 1 has fraction 0.5", "0 in a free slot"),
    ),
    "fractions that do not sum to 1": (
        {"slots": SLOTS, "fractions": FRACTIONS * 0.9},
        ("layer 0: fractions of expert 0 sum to 0.900000",),
    ),
    "another name": ({"a": SLOTS, "b": SLOTS}, ("a, b", "'slots'")),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_that_is_no_plan(tmp_path: Path, name: str) -> None:
    arrays, words = ARCHIVES[name]
    path = saved(tmp_path / "p.npz", **arrays)
    refused(moe_plan("convert", path, tmp_path / "out.npz"), "PLAN: ", str(path), *words)
    assert not (tmp_path / "out.npz").exists()


DOCUMENTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "something else": ({"a": 1}, ("is no plan",)),
    "a list": ([1], ("is no plan",)),
    "no spec": ({"kind": "ExpertPlacement"}, ("is no plan",)),
    "two objects": ({"kind": "List", "items": [1, 2]}, ("lists 2 objects",)),
    "a newer plan": (group_plan(schema=99), ("schema 99", "upgrade the reader")),
    "an unknown field": (group_plan(colour="red"), ("colour", "Extra inputs")),
    "slots of text": (group_plan(layers=[{"layer": 0, "slots": "0,x;1"}]), ("layer 0", "integers")),
    "other ranks": (group_plan(layers=[{"layer": 0, "slots": "0;1;2"}]), ("3 ranks", "expected 2")),
    "fractions that are none": (
        group_plan(layers=[{"layer": 0, "slots": "0;1", "fractions": "!"}]),
        ("p.json",),
    ),
    "ids of text": ({"physical_to_logical_map": [["a", 0]]}, ("layer 0, slot 0 is 'a'",)),
    "unequal rows": ({"physical_to_logical_map": [[0, 1], [0]]}, ("layer 1 has 1 slots",)),
    "no division": ({"physical_to_logical_map": [[0, 1, 2]]}, ("3 slots", "--ranks 2")),
    "layers of text": ({"initial_global_assignments": {"a": [0, 1]}}, ("'a'", "layer")),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_that_is_no_plan(tmp_path: Path, name: str) -> None:
    document, words = DOCUMENTS[name]
    path = stored(tmp_path / "p.json", json.dumps(document).encode())
    done = moe_plan("convert", path, tmp_path / "out.npz", "--ranks", 2)
    refused(done, "PLAN: ", str(path), *words)


def test_a_table_that_does_not_say_its_ranks(tmp_path: Path) -> None:
    path = encoded(tmp_path / "p.json", FULL, Format.PHYSICAL_TO_LOGICAL)
    refused(moe_plan("convert", path, tmp_path / "out.npz"), "--ranks is missing")


def test_ranks_that_contradict_the_plan(tmp_path: Path) -> None:
    path = encoded(tmp_path / "p.npz", FULL, Format.NPZ)
    done = moe_plan("convert", path, tmp_path / "out.json", "--ranks", 3)
    refused(done, "is for 2 ranks, --ranks is 3")


def test_a_plan_of_another_model_than_the_load(tmp_path: Path) -> None:
    found = read(encoded(tmp_path / "p.npz", PLACEMENT, Format.NPZ))
    check_experts("PLAN", tmp_path, found, np.array([3, 3]))
    with pytest.raises(UsageError, match=r"has 2 layers, --load has 3"):
        check_experts("PLAN", tmp_path, found, np.array([3, 3, 3]))
    with pytest.raises(UsageError, match=r"layer 1, rank 0 holds expert 2, --load has 2 experts"):
        check_experts("PLAN", tmp_path, found, np.array([3, 2]))
