"""Replay a recorded trace: what each strategy would have reached, moved and refused.

Every window is served by a plan made from earlier windows only.

  static     the plan for the first window stays
  fractions  its copies stay, their shares are solved again for every window
  full       a new plan for every window, whatever is in force
  steps      the plan in force improved for every window, whatever it costs
  policy     what the operator's rebalancing would have decided: gain against bytes and stalls

A trace is token routing (.npz, with --window-tokens), an array [windows, layers, experts], counts
of several corpora, or LoadReports of workers over time.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_placement.capacity import Capacity
from moe_placement.command import arguments, bars, flags, outputs, plot, tables, trace_files
from moe_placement.command.choice import WindowsWLE
from moe_placement.command.progress import Bar
from moe_placement.command.usage import UsageError
from moe_placement.copy_limits import CopyLimitsError
from moe_placement.decision import replay
from moe_placement.decision.policy import Mode, Policy
from moe_placement.decision.replay import Replayed, Strategy
from moe_placement.goal import Split

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

HELP = "a recorded trace under several strategies"
EXAMPLES = """\
examples:
  moe-plan replay trace.npy --ranks 32 --slots-per-rank 9
  moe-plan replay routing.npz --corpus law,code --rounds 2 --window-tokens 1024 \\
      --ranks 16 --slots-per-rank 5 --plot imbalance.svg
  moe-plan replay trace.npy --ranks 32 --slots-per-rank 9 --strategies steps,policy --json
"""
MAX_WINDOWS_SHOWN = 64
MAX_REASONS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a series of loads")
    arguments.add_choice(parser.add_argument_group("trace"))
    parser.add_argument(
        "--rounds", type=flags.whole(1, 1000), default=1, metavar="N",
        help="times that the trace is gone through (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--strategies", type=flags.names, metavar="NAME,…",
        default=tuple(strategy.value for strategy in Strategy), help="default: all of them",
    )  # fmt: skip
    arguments.add_ranks(parser, sized=True, draining=False)
    arguments.add_copies(parser)
    group = parser.add_argument_group("policy, as spec.rebalancing says it")
    group.add_argument(
        "--split", choices=[split.value for split in Split], default=Split.FRACTIONS.value,
        help="how copies share an expert's tokens (default: %(default)s)",
    )  # fmt: skip
    arguments.add_walk(group)
    group.add_argument(
        "--max-moves-per-wave", type=flags.whole(1), default=64, metavar="N",
        help="weights in one wave (default: %(default)s)",
    )  # fmt: skip
    for flag, default, most, meaning in (
        ("--min-gain-percent", 5.0, 100.0, "that a rebalance must promise"),
        ("--cooldown-seconds", 60.0, 1e9, "after a rebalance"),
        ("--window-seconds", 120.0, 1e9, "that a window lasts"),
        ("--horizon-seconds", 600.0, 1e9, "for which a plan is expected to fit"),
        ("--max-stall-millis", 20.0, 1e6, "longest pause that a switch may bring"),
    ):
        group.add_argument(
            flag, type=flags.number(0, most), default=default, metavar="X",
            help=f"{meaning} (default: %(default)g)",
        )  # fmt: skip
    group.add_argument(
        "--max-bytes-per-second", type=flags.byte_count, default=200_000_000, metavar="N",
        help="that a rank receives (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="over time: .png or .svg")
    arguments.add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    plot.check(parsed.plot)
    outputs.check_apart({"--plot": parsed.plot}, {"TRACE": parsed.trace})
    strategies = _strategies(parsed.strategies)
    windows_WLE = trace_files.read_trace(parsed.trace, arguments.choice(parsed), parsed.rounds)
    every = arguments.capacity(parsed, parsed.ranks)
    capacity = every.only(every.open_R)  # ranks that are dead take no part
    policy = _policy(parsed, capacity, windows_WLE.shape[2])
    found = _replayed(parsed, windows_WLE, capacity, policy, strategies)
    if parsed.plot is not None:
        plot.over_time(
            parsed.plot,
            {one.strategy: [window.imbalance or 1.0 for window in one.windows] for one in found},
            {one.strategy: [window.change.moves for window in one.windows] for one in found},
        )
    if parsed.json:
        tables.show_json({"strategies": [_to_json(one) for one in found]})
    else:
        _show(windows_WLE, found)
    return 0


def _strategies(names: Sequence[str]) -> list[Strategy]:
    known = [strategy.value for strategy in Strategy]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"--strategies: {unknown[0]!r} is none of {', '.join(known)}")
    return [Strategy(name) for name in dict.fromkeys(names)]


def _policy(parsed: argparse.Namespace, capacity: Capacity, num_experts: int) -> Policy:
    if len(np.unique(capacity.slots_R)) > 1:
        raise UsageError("--slots-per-rank: a policy has the same number for all ranks: give one")
    if capacity.room < num_experts:
        raise UsageError(
            f"--slots-per-rank: {capacity.room} slots in all can not hold {num_experts} experts"
        )
    copies = arguments.copy_limits(parsed)
    try:
        copies.check(num_experts, capacity.slots_R)
    except CopyLimitsError as error:
        raise UsageError(f"--min-copies: {error}") from error
    return Policy(
        mode=Mode.AUTO,
        serving_slots=int(capacity.slots_R[0]),
        min_gain_percent=parsed.min_gain_percent,
        cooldown_seconds=parsed.cooldown_seconds,
        max_moves_per_round=parsed.max_moves_per_wave,
        split=Split(parsed.split),
        copies=copies,
        bytes_per_expert=parsed.bytes_per_expert,
        max_bytes_per_second=parsed.max_bytes_per_second,
        max_stall_millis=parsed.max_stall_millis,
        horizon_seconds=parsed.horizon_seconds,
        speeds=tuple(capacity.speeds_R.tolist()),
        domains=tuple(capacity.domains_R.tolist()),
    )


def _replayed(
    parsed: argparse.Namespace,
    windows_WLE: WindowsWLE,
    capacity: Capacity,
    policy: Policy,
    strategies: Sequence[Strategy],
) -> list[Replayed]:
    num_slots = policy.serving_slots + parsed.spare_slots
    out = []
    with Bar("replaying", len(strategies) * len(windows_WLE)) as bar:
        for strategy in strategies:
            try:
                one = replay.replay(
                    list(windows_WLE), capacity.num_ranks, num_slots, policy, strategy,
                    window_seconds=parsed.window_seconds,
                )  # fmt: skip
            except ValueError as error:
                raise UsageError(str(error)) from error
            out.append(one)
            bar.advance(len(windows_WLE))
    return out


def _show(windows_WLE: WindowsWLE, found: Sequence[Replayed]) -> None:
    num_windows, num_layers, num_experts = windows_WLE.shape
    parts: list[RenderableType] = [
        tables.text(
            f"{num_windows} windows, {num_layers} layers × {num_experts} experts; "
            f"{len(found[0].windows)} windows are scored",
            "bold",
        ),
        _summary(found),
        _over_time(found),
    ]
    decided = [one for one in found if one.strategy is Strategy.POLICY]
    if decided:
        parts.append(_reasons(decided[0]))
    tables.show(*parts)


def _summary(found: Sequence[Replayed]) -> Table:
    rows = [
        [
            one.strategy.value,
            f"{one.imbalance:.3f}",
            tables.percent(one.gap, 1),
            tables.percent(one.gap_solved, 1),
            tables.percent(one.moved_share, 1),
            f"{one.moves:,}",
            tables.size(one.bytes),
            f"{one.waves:,}",
        ]
        for one in found
    ]
    headings = ["", "imbalance", "gap", "re-solved", "moved/window", "moves", "bytes", "waves"]
    return tables.table(headings, rows)


def _over_time(found: Sequence[Replayed]) -> Table:
    """Imbalance of the windows, one character each, on one scale."""
    series = [
        np.array([window.imbalance or 1.0 for window in one.windows], dtype=np.float64)
        for one in found
    ]
    highest = max(float(values.max()) for values in series) - 1
    rows = []
    for one, values in zip(found, series, strict=True):
        shown, size = bars.joined(values - 1, MAX_WINDOWS_SHOWN)
        line = bars.strip(np.append(shown, highest), len(shown) + 1)[0][:-1]
        rows.append([one.strategy.value, line])
    each = f", {size} windows each" if size > 1 else ""
    heading = f"imbalance over time (full height = {highest + 1:.2f}{each})"
    return tables.table(["", heading], rows, left=2)


def _reasons(decided: Replayed) -> Table:
    """What the policy said, most often first, with the last example of each."""
    changes = [window.change for window in decided.windows]
    counts = Counter(change.reason for change in changes)
    last = {change.reason: change.message for change in changes}
    rows = [[reason, str(count), last[reason]] for reason, count in counts.most_common(MAX_REASONS)]
    return tables.table(["policy said", "times", "for example"], rows, wrap=(2,))


def _to_json(one: Replayed) -> dict[str, Any]:
    return {
        "strategy": one.strategy.value,
        "imbalance": one.imbalance,
        "gap": one.gap,
        "gap_solved": one.gap_solved,
        "moves": one.moves,
        "moved_share": one.moved_share,
        "bytes": one.bytes,
        "waves": one.waves,
        "windows": [asdict(window) for window in one.windows],
    }
