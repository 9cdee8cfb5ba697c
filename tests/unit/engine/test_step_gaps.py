from __future__ import annotations

from moe_worker.engine.gaps import StepGaps


def steps(gaps: StepGaps, *spans: tuple[float, float]) -> list[float | None]:
    stalls = []
    for begin, end in spans:
        stalls.append(gaps.begin_step(begin))
        gaps.end_step(end)
    return stalls


def test_a_gap_is_what_lies_between_two_busy_steps() -> None:
    gaps = StepGaps()
    steps(gaps, (0.0, 5.0), (5.1, 9.0), (9.3, 10.0), (10.2, 11.0))
    assert round(gaps.longest_seconds, 6) == 0.3
    assert round(gaps.median_seconds, 6) == 0.2


def test_a_pause_without_work_is_no_gap() -> None:
    gaps = StepGaps()
    steps(gaps, (0.0, 1.0), (1.1, 2.0))
    gaps.idle()
    steps(gaps, (60.0, 61.0))
    assert round(gaps.longest_seconds, 6) == 0.1


def test_the_stall_of_a_switch_is_its_gap_less_the_median_before() -> None:
    gaps = StepGaps()
    steps(gaps, (0.0, 1.0), (1.1, 2.0), (2.1, 3.0))
    assert gaps.switch()
    (stall,) = steps(gaps, (3.5, 4.0))
    assert stall is not None
    assert round(stall, 6) == 0.4
    assert round(gaps.longest_seconds, 6) == 0.5, "the epoch's figures begin with its switch"
    assert steps(gaps, (4.1, 5.0)) == [None]


def test_a_switch_in_a_pause_stalls_nobody() -> None:
    gaps = StepGaps()
    steps(gaps, (0.0, 1.0))
    gaps.idle()
    assert not gaps.switch()
    assert steps(gaps, (9.0, 9.1)) == [None]
    # The same when the group had work at the switch and none after it.
    assert gaps.switch()
    assert gaps.idle()
    assert steps(gaps, (20.0, 21.0)) == [None]
    assert not gaps.idle()


def test_no_steps_no_figures() -> None:
    gaps = StepGaps()
    assert gaps.longest_seconds == gaps.median_seconds == 0.0
