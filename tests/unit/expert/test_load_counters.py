from __future__ import annotations

import numpy as np

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
