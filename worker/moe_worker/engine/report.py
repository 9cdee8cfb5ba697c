"""What the engine tells about itself: WorkerState and LoadReport, read from other threads.

Nothing is counted here; every figure is read from where it lives.
"""

from __future__ import annotations

from moe_api.load import LoadReport
from moe_api.worker import KvState, WarmUpState, WorkerState
from moe_worker.engine.loading import Loader
from moe_worker.engine.loop import EngineLoop
from moe_worker.engine.settings import EngineSettings
from moe_worker.expert.bank import SlotsLS
from moe_worker.model import config as model_config
from moe_worker.model.kv_layout import kv_format

_CONSISTENT_READS = 5


def worker_state(
    settings: EngineSettings, loop: EngineLoop, warm_up: WarmUpState | None, now_seconds: float
) -> WorkerState:
    group, preparation, loader = loop.group, loop.preparation, loop.tools.loader
    loaded, failure = loader.loaded, loop.failure
    plan = group.plan if group is not None else loop.broken
    generation = plan.generation if plan is not None else 0
    applied_epoch = plan.epoch if plan is not None else 0
    wave = group.wave if group is not None else None
    migration = wave.state() if wave is not None else group.migration if group else None
    scheduler = loaded.scheduler if loaded is not None else None
    prepared, missing, waiting_for = generation, list[int](), None
    if preparation is not None:
        prepared = preparation.plan.generation if preparation.prepared else generation
        missing = preparation.missing_members(now_seconds, settings.missing_grace_seconds)
        waiting_for = preparation.message
    return WorkerState(
        incarnation=settings.incarnation,
        member=settings.member,
        phase=loop.phase,
        model=model_config.shape(loader.arch, settings.config.kv),
        warm_up=warm_up,
        generation=generation,
        applied_epoch=applied_epoch,
        staged_epoch=wave.epoch if wave is not None and wave.complete else applied_epoch,
        abandoned_epoch=group.abandoned_epoch if group is not None else 0,
        prepared_generation=prepared,
        slots=slots_text(loaded.bank.in_force_LS) if loaded is not None else None,
        migration=migration,
        missing_members=missing,
        suspects=loop.suspects,
        requests_running=scheduler.num_running if scheduler is not None else 0,
        requests_waiting=scheduler.num_waiting if scheduler is not None else 0,
        kv_blocks_used=scheduler.blocks.num_used if scheduler is not None else 0,
        kv_blocks_cached=scheduler.blocks.num_cached if scheduler is not None else 0,
        kv_blocks_total=scheduler.blocks.num_blocks if scheduler is not None else 0,
        kv=_kv_state(settings, loader),
        last_error=waiting_for or loop.last_error,
        error_reason=failure.reason if failure is not None else None,
    )


def load_report(settings: EngineSettings, loop: EngineLoop, now_seconds: float) -> LoadReport:
    """Counters with the plan under which they were read."""
    loaded = loop.tools.loader.loaded
    for _ in range(_CONSISTENT_READS):
        group = loop.group
        plan = group.plan if group is not None else loop.broken
        counts = loaded.counters.snapshot() if loaded is not None else None
        if loop.group is group and (group is None or group.plan is plan):
            break
    gaps = group.gaps if group is not None else None
    return LoadReport(
        incarnation=settings.incarnation,
        member=settings.member,
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


def _kv_state(settings: EngineSettings, loader: Loader) -> KvState | None:
    if loader.loaded is None:
        return None
    cache = loader.loaded.runner.kv
    return KvState(
        format=kv_format(loader.arch, settings.config.kv).name,
        bytes=cache.num_bytes,
        scales=cache.scales,
        quantization_errors=cache.quantization_errors,
    )


def slots_text(slots_LS: SlotsLS) -> str:
    """Experts held per layer as in LayerPlacement, for one rank: layers joined by '|'."""
    return "|".join(",".join(str(int(expert)) for expert in row) for row in slots_LS)
