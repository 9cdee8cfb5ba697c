"""The shell of `moe-worker local`: processes, what they say, the plan put to them, the terminal.

look at every rank → ask the director → put its plan to who does not run it → show → again
"""

from __future__ import annotations

import logging
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.live import Live

from moe_api.plan import GroupPlan
from moe_api.worker import (
    KvConfig,
    ModelConfig,
    WorkerConfig,
    WorkerPhase,
)
from moe_placement.decision.decide import Mode, Policy
from moe_placement.initial import InsufficientSlots
from moe_worker.local import table
from moe_worker.local.client import ControlClient
from moe_worker.local.director import Director, Living, Rules, hung, in_force
from moe_worker.local.processes import Launch, RankProcess
from moe_worker.model.config import ModelHasNoExperts, ModelUnreadable, load_architecture

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
MAX_STARTS = 5
"""Of one rank, before the whole group is given up."""
MEMORY_FRACTION = 0.8
"""Of the machine, for all ranks together."""
DRAIN_SECONDS = 20
MAX_STALL_MILLIS = 1000.0
"""Of a switch that is still worth it: ranks that share a machine stall each other."""


@dataclass(frozen=True)
class Options:
    """The command's flags, parsed."""

    model: Path
    name: str
    dtype: str
    kv: str
    ranks: int
    redundant_slots: int
    spare_slots: int
    network: str
    threads: int
    kernels: str
    mode: Mode
    interval_seconds: float
    window_seconds: float
    cooldown_seconds: float
    min_gain_percent: float
    log_dir: Path | None


def run_group(options: Options) -> int:
    """Bring the group up and hold it until a signal; returns the exit code."""
    console = Console()
    try:
        num_experts = load_architecture(options.model).num_experts
    except (ModelUnreadable, ModelHasNoExperts) as error:
        _say(console, f"moe-worker local: {error}")
        return 2
    with tempfile.TemporaryDirectory(prefix="moe-local-") as private:
        log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="moe-local-logs-"))
        log_dir.mkdir(parents=True, exist_ok=True)
        token = secrets.token_urlsafe(32)
        launch = _launch(options, Path(private), log_dir, token)
        client = ControlClient(token, options.ranks)
        stop = _Stop()
        ranks = [RankProcess(member, launch) for member in range(options.ranks)]
        try:
            director = Director(_rules(options, num_experts))
            return _hold(ranks, director, client, stop, console, log_dir)
        finally:
            _end(ranks, stop, console)
            client.close()


def _hold(
    ranks: Sequence[RankProcess],
    director: Director,
    client: ControlClient,
    stop: _Stop,
    console: Console,
    log_dir: Path,
) -> int:
    """The loop; returns why it ended as an exit code."""
    said: tuple[str, ...] = ()
    served = False
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while not stop.asked.wait(LOOK_SECONDS):
            problem = _revive(ranks)
            living = _look(ranks, client)
            for member in hung(director.plan, living):
                logger.warning("rank %d answers nobody: its process is ended", member)
                ranks[member].kill()
            problem = problem or _failure(living)
            if problem is not None:
                _say(console, problem)
                return 1
            try:
                plan = director.look(living, time.monotonic())
            except InsufficientSlots as error:
                _say(console, f"moe-worker local: {error}")
                return 2
            if plan is not None:
                _announce(plan, living, client)
            if not served and _all_serve(living, len(ranks)):
                served = True
                urls = "  ".join(f"http://{rank.address}:8000/v1" for rank in ranks)
                _say(console, f"serving: {urls}")
            if console.is_terminal:
                live.update(table.render(director, living, len(ranks), str(log_dir)), refresh=True)
            elif (headline := table.headline(director, living)) != said:
                said = headline
                text = f"{headline[0]} | {headline[1]} | {director.event}"
                _say(console, text)
    return 0


def _say(console: Console, text: str) -> None:
    """As it is: not broken at the width of a terminal, for it may be searched and copied."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _look(ranks: Sequence[RankProcess], client: ControlClient) -> list[Living]:
    alive = [rank for rank in ranks if rank.exit_code is None]
    addresses = [rank.address for rank in alive]
    states, loads = client.states(addresses), client.loads(addresses)
    return [
        Living(rank.member, rank.incarnation, rank.address, state, load)
        for rank, state, load in zip(alive, states, loads, strict=True)
        # A process that has just been replaced may still answer under the address.
        if state is None or state.incarnation == rank.incarnation
    ]


def _announce(plan: GroupPlan, living: Sequence[Living], client: ControlClient) -> None:
    """Put the plan to every rank that does not run it yet, or was left out of it."""
    named = {member.incarnation for member in plan.members}
    behind = [
        rank.address
        for rank in living
        if rank.state is not None
        and not in_force(plan, rank.state)
        and (rank.incarnation in named or rank.state.generation > 0)
    ]
    for address, refusal in zip(behind, client.put_plan(behind, plan), strict=True):
        if refusal is not None:
            logger.warning("%s did not take the plan: %s", address, refusal)


def _revive(ranks: Sequence[RankProcess]) -> str | None:
    """Start dead ranks anew; what to say when one dies again and again."""
    for rank in ranks:
        if rank.exit_code is None:
            continue
        if rank.num_starts >= MAX_STARTS:
            return (
                f"rank {rank.member} ended {rank.num_starts} times, last with exit code "
                f"{rank.exit_code}; its log {rank.log_file} ends with:\n{rank.last_words()}"
            )
        logger.warning("rank %d ended with exit code %s", rank.member, rank.exit_code)
        rank.start()
    return None


def _failure(living: Sequence[Living]) -> str | None:
    for rank in living:
        if rank.state is not None and rank.state.phase is WorkerPhase.FAILED:
            return f"rank {rank.member} cannot serve: {rank.state.last_error}"
    return None


def _all_serve(living: Sequence[Living], num_ranks: int) -> bool:
    phases = [rank.state.phase for rank in living if rank.state is not None]
    return phases == [WorkerPhase.SERVING] * num_ranks


def _end(ranks: Sequence[RankProcess], stop: _Stop, console: Console) -> None:
    """Drain all; a second signal ends them at once."""
    for rank in ranks:
        rank.terminate()
    deadline = time.monotonic() + DRAIN_SECONDS + 10
    while time.monotonic() < deadline and not stop.hurried.is_set():
        if all(rank.wait(0.1) for rank in ranks):
            return
    console.print("ending the ranks now", highlight=False)
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.wait(10)


def _launch(options: Options, private: Path, log_dir: Path, token: str) -> Launch:
    config_file, token_file = private / "worker.json", private / "token"
    config = WorkerConfig.model_validate(
        {
            "model": ModelConfig.model_validate(
                {
                    "path": str(options.model.resolve()),
                    "served_name": options.name,
                    "dtype": options.dtype,
                }
            ),
            "kv": KvConfig.model_validate(
                {
                    "dtype": options.kv,
                    "memory_fraction": max(0.05, MEMORY_FRACTION / options.ranks),
                }
            ),
            "kernels": options.kernels,
            "drain_seconds": DRAIN_SECONDS,
        }
    )
    config_file.write_text(config.to_json())
    token_file.touch(mode=0o600)
    token_file.write_text(token)
    return Launch(config_file, token_file, log_dir, options.network, options.threads)


def _rules(options: Options, num_experts: int) -> Rules:
    serving_slots = -(-num_experts // options.ranks) + options.redundant_slots
    return Rules(
        num_ranks=options.ranks,
        spare_slots=options.spare_slots,
        interval_seconds=options.interval_seconds,
        window_seconds=options.window_seconds,
        policy=Policy(
            mode=options.mode,
            serving_slots=serving_slots,
            min_gain_percent=options.min_gain_percent,
            cooldown_seconds=options.cooldown_seconds,
            max_moves_per_round=64,
            max_stall_millis=MAX_STALL_MILLIS,
        ),
    )


class _Stop:
    """Signals: the first asks for a clean end, the second for a quick one."""

    def __init__(self) -> None:
        self.asked, self.hurried = threading.Event(), threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked.is_set():
            self.hurried.set()
        self.asked.set()
