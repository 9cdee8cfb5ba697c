"""Strategic merge of a pod overlay: exact cases, then what must hold for any."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_operator.overlay import merge

BASE = {
    "metadata": {"labels": {"a": "1"}},
    "spec": {
        "restartPolicy": "Never",
        "containers": [
            {
                "name": "worker",
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                "securityContext": {"runAsNonRoot": True, "capabilities": {"drop": ["ALL"]}},
            }
        ],
        "tolerations": [{"key": "x"}],
    },
}


def container(**changes):
    return {"spec": {"containers": [{"name": "worker", **changes}]}}


def merged_container(**changes):
    [worker] = merge(BASE, container(**changes))["spec"]["containers"]
    return worker


def test_maps_merge_key_by_key():
    out = merge(BASE, {"metadata": {"labels": {"b": "2"}, "annotations": {"c": "3"}}})
    assert out["metadata"] == {"labels": {"a": "1", "b": "2"}, "annotations": {"c": "3"}}


def test_containers_and_their_variables_merge_by_name():
    worker = merged_container(env=[{"name": "B", "value": "9"}, {"name": "C", "value": "3"}])
    assert [(e["name"], e["value"]) for e in worker["env"]] == [("A", "1"), ("B", "9"), ("C", "3")]


def test_mounts_merge_by_path():
    worker = merged_container(volumeMounts=[{"name": "big", "mountPath": "/tmp"}])
    assert worker["volumeMounts"] == [{"name": "big", "mountPath": "/tmp"}]


def test_another_container_comes_behind():
    out = merge(BASE, {"spec": {"containers": [{"name": "sidecar"}]}})
    assert [c["name"] for c in out["spec"]["containers"]] == ["worker", "sidecar"]


def test_null_removes():
    worker = merged_container(securityContext={"runAsNonRoot": None})
    assert worker["securityContext"] == {"capabilities": {"drop": ["ALL"]}}


def test_other_lists_are_replaced():
    out = merge(BASE, {"spec": {"tolerations": [{"key": "y"}]}})
    assert out["spec"]["tolerations"] == [{"key": "y"}]


@pytest.mark.parametrize("overlay", [{}, {"metadata": {}}, {"spec": {"containers": []}}])
def test_an_empty_overlay_changes_nothing(overlay):
    assert merge(BASE, overlay) == BASE


values = st.recursive(
    st.integers() | st.text(max_size=3) | st.booleans(),
    lambda inner: st.dictionaries(st.sampled_from(["a", "b", "spec"]), inner, max_size=3),
    max_leaves=6,
)
maps = st.dictionaries(st.sampled_from(["a", "b", "spec"]), values, max_size=3)


@given(maps, maps)
def test_merging_twice_is_merging_once_and_inputs_stay(base, overlay):
    before = copy.deepcopy((base, overlay))
    once = merge(base, overlay)
    assert merge(once, overlay) == once
    assert (base, overlay) == before
