"""What the engine tells about itself: WorkerState and LoadReport, read from other threads.

Nothing is counted here; every figure is read from where it lives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_api.load import LoadReport
from moe_api.worker import WorkerState
from moe_worker.expert.bank import SlotsLS
from moe_worker.model import config as model_config

if TYPE_CHECKING:
    from moe_worker.engine.engine import Engine

_CONSISTENT_READS = 5


def worker_state(engine: Engine, now_seconds: float) -> WorkerState:
    group, preparation, loaded = engine.group, engine.preparation, engine.loaded
    plan = group.plan if group is not None else engine.broken
    generation = plan.generation if plan is not None else 0
    applied_epoch = plan.epoch if plan is not None else 0
    wave = group.wave if group is not None else None
    failure, scheduler = engine.failure, loaded.scheduler if loaded is not None else None
    is_prepared = preparation is not None and preparation.prepared
    grace = engine.settings.missing_grace_seconds
    return WorkerState(
        incarnation=engine.settings.incarnation,
        member=engine.settings.member,
        phase=engine.phase,
        model=model_config.shape(engine.arch, engine.settings.config.kv),
        generation=generation,
        applied_epoch=applied_epoch,
        staged_epoch=wave.epoch if wave is not None and wave.complete else applied_epoch,
        abandoned_epoch=group.abandoned_epoch if group is not None else 0,
        prepared_generation=(
            preparation.plan.generation if preparation is not None and is_prepared else generation
        ),
        slots=slots_text(loaded.bank.in_force_LS) if loaded is not None else None,
        migration=(
            wave.state() if wave is not None else group.migration if group is not None else None
        ),
        missing_members=(
            preparation.missing_members(now_seconds, grace) if preparation is not None else []
        ),
        suspects=engine.suspects,
        requests_running=scheduler.num_running if scheduler is not None else 0,
        requests_waiting=scheduler.num_waiting if scheduler is not None else 0,
        kv_blocks_used=scheduler.blocks.num_used if scheduler is not None else 0,
        kv_blocks_total=scheduler.blocks.num_blocks if scheduler is not None else 0,
        last_error=(preparation.message if preparation is not None else None) or engine.last_error,
        error_reason=failure.reason if failure is not None else None,
    )


def load_report(engine: Engine, now_seconds: float) -> LoadReport:
    """Counters with the plan under which they were read."""
    for _ in range(_CONSISTENT_READS):
        plan, loaded, group = engine.plan, engine.loaded, engine.group
        counts = loaded.counters.snapshot() if loaded is not None else None
        if engine.plan is plan:
            break
    gaps = group.gaps if group is not None else None
    return LoadReport(
        incarnation=engine.settings.incarnation,
        member=engine.settings.member,
        generation=plan.generation if plan is not None else 0,
        epoch=plan.epoch if plan is not None else 0,
        monotonic_seconds=now_seconds,
        routed=counts.routed_LE if counts is not None else [],
        served=counts.served_LS if counts is not None else [],
        steps=group.num_steps if group is not None else 0,
        max_step_gap_millis=gaps.longest_seconds * 1e3 if gaps is not None else 0.0,
        median_step_gap_millis=gaps.median_seconds * 1e3 if gaps is not None else 0.0,
        invalid_expert_ids=counts.invalid_expert_ids if counts is not None else 0,
    )


def slots_text(slots_LS: SlotsLS) -> str:
    """Experts held per layer as in LayerPlacement, for one rank: layers joined by '|'."""
    return "|".join(",".join(str(int(expert)) for expert in row) for row in slots_LS)
