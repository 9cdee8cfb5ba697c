from __future__ import annotations

import numpy as np

from moe_kernels.stack import Counts
from moe_worker.expert.load import LoadCounters


def test_a_failed_step_counts_nothing_and_its_repetition_once() -> None:
    counters = LoadCounters(2, 3, 2)
    for _ in range(2):
        counters.discard()
        counters.count_routed(1, np.array([4, 0, 1]), num_invalid=2)
        counters.count_served(0, np.array([5, 6]))
    assert counters.snapshot().routed_LE == [[0, 0, 0], [0, 0, 0]]
    counters.commit()
    counters.discard()
    counts = counters.snapshot()
    assert counts.routed_LE == [[0, 0, 0], [4, 0, 1]]
    assert counts.served_LS == [[5, 6], [0, 0]]
    assert counts.invalid_expert_ids == 2


def test_counts_only_grow_when_the_number_of_slots_changes() -> None:
    counters = LoadCounters(1, 1, 2)
    counters.count_served(0, np.array([5, 6]))
    counters.commit()
    counters.resize(3)
    counters.count_served(0, np.array([1, 1, 1]))
    counters.commit()
    assert counters.snapshot().served_LS == [[6, 7, 1]]


def test_runs_of_layers_count_as_their_layers_do() -> None:
    at_once, by_layer = LoadCounters(3, 2, 3), LoadCounters(3, 2, 3)
    routed_LE, served_LS = np.arange(4).reshape(2, 2), np.arange(5, 9).reshape(2, 2)
    for _ in range(2):
        at_once.count_run(1, Counts(routed_LE, served_LS, 7))
        for layer, invalid in ((0, 3), (1, 4)):
            by_layer.count_routed(1 + layer, routed_LE[layer], invalid)
            by_layer.count_served(1 + layer, served_LS[layer])
        for counters in (at_once, by_layer):
            counters.commit()
    assert at_once.snapshot() == by_layer.snapshot()
    assert at_once.snapshot().routed_LE == [[0, 0], [0, 2], [4, 6]]
    assert at_once.snapshot().served_LS == [[0, 0, 0], [10, 12, 0], [14, 16, 0]]


def test_what_is_routed_stays_in_its_place() -> None:
    """Others look at the same memory."""
    counters = LoadCounters(1, 2, 1)
    seen = counters.routed_LE
    counters.count_routed(0, np.array([1, 2]), 0)
    assert seen.tolist() == [[0, 0]]
    counters.commit()
    counters.resize(4)
    assert seen.tolist() == [[1, 2]]
