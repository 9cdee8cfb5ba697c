"""What the demo measured, whether that is what was promised, and how it is printed. Pure."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field

MIN_IMBALANCE_BEFORE = 1.3
MIN_ALLOWED_AFTER = 1.15
AFTER_OVER_PREDICTED = 1.1
NOISE_FACTOR = 1.8


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
    imbalance_predicted: float | None = None
    imbalance_after: float | None = None
    tokens_after: int = 0
    """Token-to-expert assignments of one layer behind `imbalance_after`."""
    epoch: int | None = None
    moves: int = 0
    swap_stall_millis: float | None = None
    answers_equal: bool | None = None
    survivors_serving_seconds: float | None = None
    recovery_seconds: float | None = None
    seconds_total: float | None = None
    steps: dict[str, float] = field(default_factory=dict)


def noise(num_ranks: int, assignments: int) -> float:
    """What a perfectly balanced group's imbalance reads above 1 by chance alone."""
    return NOISE_FACTOR * math.sqrt(num_ranks / assignments) if assignments else math.inf


def assignments_for(num_ranks: int, wanted_noise: float) -> int:
    """Assignments per layer after which the noise is `wanted_noise`."""
    return math.ceil(num_ranks * (NOISE_FACTOR / wanted_noise) ** 2)


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
    elif after > (allowed := max(MIN_ALLOWED_AFTER, AFTER_OVER_PREDICTED * predicted)):
        broken.append(f"imbalance after is {after:.3f}, more than {allowed:.3f}")
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
        ("imbalance predicted", _figure(measured.imbalance_predicted)),
        ("imbalance after", f"{_figure(measured.imbalance_after)} "
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
