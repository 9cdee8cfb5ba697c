"""What the demo measured, whether that is what was promised, and how it is printed. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

MIN_IMBALANCE_BEFORE = 1.3
MAX_IMBALANCE_AFTER = 1.15
MAX_OFF_PREDICTED = 0.02
"""Of what the plan predicted for the recorded prompts, in either direction."""


@dataclass
class Measured:
    """Filled scene by scene; what was never reached stays None and fails the demo."""

    first_token_seconds: float | None = None
    requests: int = 0
    failed_requests: int = 0
    """Outside the scene that kills a worker."""
    retried_requests: int = 0
    failed_on_killed_rank: int = 0
    failed_on_survivors: int = 0
    imbalance_before: float | None = None
    """Of the recorded prompts under the first placement, as served."""
    imbalance_planned: float | None = None
    """The operator's own forecast, for all traffic in its window."""
    imbalance_predicted: float | None = None
    """What the plan in force promises for the recorded prompts."""
    imbalance_after: float | None = None
    """Of the same prompts replayed under that plan, as served."""
    tokens_after: int = 0
    """Token-to-expert assignments of one layer behind each of these."""
    epoch: int | None = None
    moves: int = 0
    swap_stall_millis: float | None = None
    answers_equal: bool | None = None
    survivors_serving_seconds: float | None = None
    recovery_seconds: float | None = None
    seconds_total: float | None = None
    steps: dict[str, float] = field(default_factory=dict)


def broken_promises(measured: Measured) -> list[str]:
    """Every promise that the run did not keep, as a sentence; empty = success."""
    broken = []
    before, predicted, after = (
        measured.imbalance_before,
        measured.imbalance_predicted,
        measured.imbalance_after,
    )
    if before is None or before < MIN_IMBALANCE_BEFORE:
        broken.append(
            f"imbalance before is {_figure(before)}, the traffic shows nothing "
            f"below {MIN_IMBALANCE_BEFORE}"
        )
    if predicted is None or after is None:
        broken.append("no rebalance was measured")
    else:
        if after > MAX_IMBALANCE_AFTER:
            broken.append(f"imbalance after is {after:.3f}, more than {MAX_IMBALANCE_AFTER}")
        if abs(after / predicted - 1) > MAX_OFF_PREDICTED:
            broken.append(
                f"imbalance after is {after:.3f}, the plan predicted {predicted:.3f} for the same "
                "prompts"
            )
    if measured.moves < 1:
        broken.append("no expert was moved")
    if measured.failed_requests:
        broken.append(f"{measured.failed_requests} requests failed with no worker lost")
    if measured.failed_on_survivors:
        broken.append(f"{measured.failed_on_survivors} requests failed on surviving ranks")
    if not measured.answers_equal:
        broken.append("greedy answers differ before, during and after")
    if measured.first_token_seconds is None:
        broken.append("no chat answer was streamed")
    if measured.survivors_serving_seconds is None:
        broken.append("the survivors did not serve on")
    if measured.recovery_seconds is None:
        broken.append("the deployment did not come back to Ready")
    return broken


def rows(measured: Measured) -> list[tuple[str, str]]:
    """The closing table, (what, figure)."""
    return [
        ("first token", _seconds(measured.first_token_seconds)),
        ("requests / failed / retried", f"{measured.requests} / {measured.failed_requests} / "
         f"{measured.retried_requests}"),
        ("imbalance before", _figure(measured.imbalance_before)),
        ("imbalance planned, all traffic", _figure(measured.imbalance_planned)),
        ("imbalance predicted, same prompts", _figure(measured.imbalance_predicted)),
        ("imbalance after, same prompts", f"{_figure(measured.imbalance_after)} "
         f"({measured.tokens_after} assignments a layer)"),
        ("epoch / moves", f"{measured.epoch} / {measured.moves}"),
        ("longest stall at a switch", f"{_figure(measured.swap_stall_millis)} ms"),
        ("greedy answers equal", "yes" if measured.answers_equal else "NO"),
        ("killed rank: requests lost", str(measured.failed_on_killed_rank)),
        ("survivors serving again", _seconds(measured.survivors_serving_seconds)),
        ("kill → Ready", _seconds(measured.recovery_seconds)),
        ("total", _seconds(measured.seconds_total)),
    ]  # fmt: skip


def json_line(measured: Measured) -> str:
    """The last line of the demo's output, for programs."""
    rounded = {
        key: round(value, 4) if isinstance(value, float) else value
        for key, value in asdict(measured).items()
    }
    return "demo: " + json.dumps(rounded)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"
