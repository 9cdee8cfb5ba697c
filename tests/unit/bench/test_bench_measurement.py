"""Records are added up: counts agree with each other, latencies are those of answers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from moe_worker.bench.measurement import LATENCIES, MAX_DETAILS, Measurement
from moe_worker.bench.objective import Objective
from moe_worker.bench.progress import described
from moe_worker.bench.record import Outcome, Record, Tokens
from moe_worker.bench.report import Ending, Report, report
from moe_worker.bench.table import ROWS, render
from tests.support.bench_records import record

SLO = Objective(ttft_seconds=0.5, itl_seconds=0.1)
COUNTS = st.none() | st.integers(0, 50)


@st.composite
def records(draw: st.DrawFn) -> Record:
    due = draw(st.floats(0, 100))
    texts: list[float] = []
    for gap in draw(st.lists(st.floats(0, 1), max_size=5)):
        texts.append((texts[-1] if texts else due) + gap)
    end = (texts[-1] if texts else due) + draw(st.floats(0, 1))
    return record(
        draw(st.sampled_from(Outcome)),
        due=due,
        sent=draw(st.none() | st.just(due)),
        texts=tuple(texts),
        end=end,
        tokens=Tokens(draw(COUNTS), draw(COUNTS), draw(COUNTS)),
        retries=draw(st.integers(0, 3)),
        detail=draw(st.text(max_size=3)),
    )


def added(ended: list[Record], objective: Objective = SLO, unfinished: int = 0) -> Measurement:
    measurement = Measurement(0.0, objective, seed=0)
    for _ in range(len(ended) + unfinished):
        measurement.start()
    for one in ended:
        measurement.add(one)
    return measurement


def reported(ended: list[Record], objective: Objective = SLO, unfinished: int = 0) -> Report:
    interrupted = 1000.0 if unfinished else None
    return report(added(ended, objective, unfinished), objective, {"model": "m"}, interrupted)


def shown(found: Report) -> str:
    console = Console(width=100, color_system=None, record=True, file=None)
    with console.capture() as captured:
        console.print(render(found))
    return captured.get()


@settings(max_examples=50)  # each draws a table
@given(st.lists(records(), max_size=12), st.integers(0, 3))
def test_a_report_agrees_with_itself(ended: list[Record], unfinished: int) -> None:
    found = reported(ended, unfinished=unfinished)
    ok = [one for one in ended if one.is_ok]
    assert sum(found.outcomes.values()) == len(ended)
    assert found.num_failed == len(ended) - len(ok)
    assert found.num_unfinished == unfinished
    assert sum(found.details.values()) <= found.num_failed
    assert len(found.details) <= MAX_DETAILS
    assert found.tokens.output == sum(one.output_tokens for one in ok)
    assert found.tokens.answers_without_usage == sum(one.tokens.output is None for one in ok)
    if found.goodput is not None:
        assert found.goodput.requests == sum(map(SLO.met_by, ended)) <= len(ok)
        assert 0 <= found.goodput.share <= 1
    whole = found.latencies["end_to_end"]
    assert (0 if whole is None else whole.count) == len(ok)
    itl = found.latencies["itl"]
    gaps = sum(max(0, len(one.text_seconds) - 1) for one in ok)
    assert (0 if itl is None else itl.count) == gaps
    assert json.loads(json.dumps(found.to_wire(), allow_nan=False)) == found.to_wire()
    assert f"{found.num_started:,} request" in shown(found)


def test_figures_are_what_they_say() -> None:
    fast = record(
        due=1.0, sent=1.1, texts=(1.3, 1.35, 1.4), end=1.5, tokens=Tokens(100, 5, 80)
    )  # fmt: skip
    slow = record(due=2.0, sent=2.0, texts=(2.6, 2.7), end=4.0, tokens=Tokens(50, 2, 0))
    refused = record(Outcome.REFUSED, due=3.0, texts=(), end=3.1, detail="429: full", retries=2)
    found = reported([fast, slow, refused])
    wire = found.to_wire()
    assert wire["seconds"] == 4.0
    assert wire["ending"] == "all requests ended"
    assert wire["requests"]["outcomes"]["ok"] == 2
    assert wire["requests"]["outcomes"]["refused"] == 1
    assert wire["requests"]["retries"] == 2
    assert wire["tokens"] == {"input": 150, "output": 7, "cached": 80, "answers_without_usage": 0}
    assert wire["throughput"] == {
        "requests_per_second": 0.5,
        "output_tokens_per_second": 1.75,
        "input_tokens_per_second": 37.5,
    }
    assert wire["goodput"] == {
        "requests": 1, "share": pytest.approx(1 / 3), "requests_per_second": 0.25,
    }  # fmt: skip
    latencies = wire["latency_seconds"]
    assert latencies["ttft"]["mean"] == pytest.approx(0.45)
    assert latencies["itl"]["max"] == pytest.approx(0.1)
    assert latencies["per_token"]["p50"] == pytest.approx((0.1 / 4 + 0.1) / 2)
    assert latencies["end_to_end"]["max"] == pytest.approx(2.0)
    assert latencies["waited"]["max"] == pytest.approx(0.1)
    assert wire["failures"] == {"refused: 429: full": 1}
    text = shown(found)
    for part in ("429, too many requests", "time to first token", "450.0", "53.3%", "33.3%"):
        assert part in text


def test_an_interruption_is_told_and_ends_the_time() -> None:
    found = reported([record(end=2.0)], unfinished=2)
    assert found.ending is Ending.INTERRUPTED
    assert found.seconds == 1000.0
    assert "interrupted" in shown(found)
    assert "under way when interrupted" in shown(found)


def test_nothing_measured_has_no_figures() -> None:
    found = reported([], Objective())
    assert found.throughput is None
    assert found.goodput is None
    assert set(found.latencies.values()) == {None}


def test_pieces_of_text_stand_for_tokens_that_usage_does_not_tell() -> None:
    found = reported([record(texts=(1.0, 2.0, 3.0), end=3.0)])
    assert found.tokens.output == 3
    assert found.tokens.input is None
    assert "1 answers without usage" in shown(found)
    assert "not told by the server" in shown(found)


@pytest.mark.parametrize(
    ("one", "is_met"),
    [
        (record(texts=(0.5,)), True),
        (record(texts=(0.51,)), False),
        (record(texts=(0.1, 0.2, 0.3), end=9.0), True),
        (record(texts=(0.1, 0.9)), False),
        (record(texts=(0.1, 0.9), tokens=Tokens(1, 9, None)), True),
        (record(texts=(), end=0.4), True),
        (record(texts=(), end=0.6), False),
        (record(Outcome.CUT_OFF, texts=(0.1,)), False),
    ],
)
def test_an_objective_is_met_by_first_text_and_mean_pace(one: Record, is_met: bool) -> None:
    assert SLO.met_by(one) == is_met


def test_every_latency_has_a_row() -> None:
    assert tuple(name for name, _ in ROWS) == LATENCIES


def test_progress_is_one_line() -> None:
    measurement = added([record(), record(Outcome.TIMED_OUT)], unfinished=3)
    assert described(measurement, 2.0) == "2 ended, 1 failed, 3 under way, 0 tokens/s"
