"""A local group on the terminal: ranks, their share of the load, imbalance, the last decision."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from moe_api.worker import WorkerState
from moe_worker.local.director import Director, Living


def render(director: Director, living: Sequence[Living], num_ranks: int, log_dir: str) -> Group:
    table = Table(box=None, pad_edge=False)
    for heading in ("rank", "address", "phase", "requests", "KV blocks", "tokens served", "share"):
        table.add_column(heading, justify="left" if heading in ("address", "phase") else "right")
    served = {rank.member: _served(rank) for rank in living}
    total = sum(count for count in served.values() if count is not None)
    known = {rank.member: rank for rank in living}
    for member in range(num_ranks):
        table.add_row(*_row(member, known.get(member), served.get(member), total))
    plan = director.plan
    numbers = f"generation {plan.generation}, epoch {director.applied_epoch}" if plan else "no plan"
    imbalance = director.measured_imbalance()
    figure = "–" if imbalance is None else f"{imbalance:.3f}"
    return Group(
        table,
        Text(f"{numbers}   imbalance since then {figure} (1 = perfect)", style="bold"),
        Text(director.event),
        Text(f"logs in {log_dir}   Ctrl-C ends", style="dim"),
    )


def headline(director: Director, living: Sequence[Living]) -> tuple[str, ...]:
    """What a log without a terminal shows a new line for: it changes when something happens, not
    with every token."""
    plan = director.plan
    numbers = f"generation {plan.generation} epoch {director.applied_epoch}" if plan else "no plan"
    phases = " ".join(f"{r.member}:{phase(r.state) if r.state else 'silent'}" for r in living)
    return numbers, phases, director.event.partition(":")[0]


def phase(state: WorkerState) -> str:
    """With how far its kernels are, while they are compiled."""
    warm_up = state.warm_up
    if warm_up is None:
        return state.phase.value
    return f"{state.phase.value} (kernels {warm_up.done}/{warm_up.total})"


def _row(member: int, rank: Living | None, served: int | None, total: int) -> list[str]:
    if rank is None:
        return [str(member), "–", "down", "", "", "", ""]
    state = rank.state
    if state is None:
        return [str(member), rank.address, "starting", "", "", "", ""]
    return [
        str(member),
        rank.address,
        phase(state),
        f"{state.requests_running}+{state.requests_waiting}",
        f"{state.kv_blocks_used}/{state.kv_blocks_total}",
        "" if served is None else f"{served:,}",
        f"{served / total:.0%}" if served is not None and total else "",
    ]


def _served(rank: Living) -> int | None:
    return None if rank.load is None else sum(map(sum, rank.load.served))
