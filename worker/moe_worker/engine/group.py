"""One generation in force: the members step together, schedule → agree → run → sample → publish.

Epochs of this generation are staged, switched and abandoned here, always by agreement of all
ranks. Any ExchangeFailed ends the generation for good; the engine then waits for the next one,
where the step that failed is run again, because nothing of it was committed.

Neighbours: `engine` owns it, `council` and `agreement` decide each step, `wave` stages epochs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from moe_api.plan import GroupPlan
from moe_api.worker import MigrationState
from moe_placement.walk.migration import diff
from moe_worker.engine.agreement import Agreement, Ballot, decide
from moe_worker.engine.council import Council
from moe_worker.engine.gaps import StepGaps
from moe_worker.engine.loading import Loader
from moe_worker.engine.observer import Observer
from moe_worker.engine.preparation import Ready
from moe_worker.engine.requests import Requests
from moe_worker.engine.sampler import Undrawable
from moe_worker.engine.schedule import Schedule
from moe_worker.engine.settings import EngineSettings
from moe_worker.engine.wave import Wave, conflict
from moe_worker.expert.migrate import PeerWeights, Staging
from moe_worker.expert.routing_table import RoutingTable

logger = logging.getLogger(__name__)

_FIRST_VOTE_SECONDS = 15.0


@dataclass(frozen=True)
class Tools:
    """What a group uses of its engine."""

    settings: EngineSettings
    requests: Requests
    observer: Observer
    peers: PeerWeights
    loader: Loader
    scheduling: threading.Lock
    """Held while the scheduler is used: requests come from other threads."""
    news: threading.Event
    """Set when there is something new to do: a request, a plan, weights that arrived."""


class Group:
    def __init__(self, ready: Ready, tools: Tools) -> None:
        """Put the generation's placement in force on this rank; the first step follows."""
        self.plan, self.rank = ready.plan, ready.rank
        self.slots_LRS = ready.slots_LRS
        self.num_steps = 0
        self.wave: Wave | None = None
        self.migration: MigrationState | None = None
        """The newest wave that came to an end here."""
        self.abandoned_epoch = 0
        self.gaps = StepGaps()
        self._tools, self._loaded = tools, ready.loaded
        self._council = Council(ready.exchange)
        self._dispatcher = ready.dispatcher
        self._idle = False
        self._put_in_force(ready)

    @property
    def size(self) -> int:
        return len(self.plan.members)

    def step(self, generation_ready: int, draining: int) -> Agreement:
        """One step of the whole group, with or without tokens.

        Raises:
            ExchangeFailed: a member failed; nothing of the step was committed.
            AgreementBroken: a bug.
        """
        self._await_turn()
        started = time.perf_counter()
        with self._tools.scheduling:
            schedule = self._loaded.scheduler.schedule()
        scheduled = time.perf_counter()
        agreement = self._agree(schedule, generation_ready, draining)
        agreed = time.perf_counter()
        if agreement.begin_generation is not None or agreement.dissolve:
            return agreement
        self._follow(agreement)
        self._idle = agreement.idle
        if agreement.idle:
            if self.gaps.idle():
                self._note_stall(0.0)
            return agreement
        self._tools.observer.step("schedule", scheduled - started)
        self._tools.observer.step("agree", agreed - scheduled)
        self._tools.observer.exchange("agree", agreed - scheduled)
        self._run(schedule, agreement)
        return agreement

    def stage(self, plan: GroupPlan, on_progress: Callable[[], None]) -> None:
        """Begin to bring an epoch of this generation; a former one that is not in force is
        forgotten."""
        self.call_off_wave()
        slots_LRS = plan.slots()
        wave = self.wave = Wave(plan, slots_LRS, time.monotonic(), on_progress)
        wave.error = conflict(self.slots_LRS, slots_LRS)
        if wave.error is not None:
            on_progress()
            return
        domains = [member.domains for member in self.plan.members]
        staging = Staging(
            moves=diff(self.slots_LRS, slots_LRS, domains, rank=self.rank),
            own_rank=self.rank,
            addresses=[member.address for member in self.plan.members],
            in_force=(self.plan.generation, self.plan.epoch),
            bank=self._loaded.bank,
            read_checkpoint=self._tools.loader.read_expert,
            peers=self._tools.peers,
            max_bytes_per_second=plan.limits.max_bytes_per_second,
            wait=wave.called_off.wait,
            on_bytes=self._tools.observer.migrated,
        )
        num_experts, device = self._loaded.counters.num_experts, self._loaded.bank.device
        wave.start(staging, lambda: RoutingTable.of_plan(plan, self.rank, num_experts, device))

    def call_off_wave(self) -> None:
        if self.wave is not None:
            self.wave.called_off.set()
            self.wave = None

    def close(self) -> None:
        """Tear down at once, so that the others notice."""
        self.call_off_wave()
        self._council.close()

    def _put_in_force(self, ready: Ready) -> None:
        bank, num_slots = self._loaded.bank, ready.slots_LRS.shape[2]
        if num_slots != bank.num_slots:
            bank.resize(num_slots)
            self._loaded.counters.resize(num_slots)
        for layer, slot, weights in ready.waiting:
            bank.write(layer, slot, weights)
        bank.in_force_LS = ready.slots_LRS[:, ready.rank].copy()
        self._loaded.layers.join(ready.dispatcher)
        self._loaded.layers.switch(ready.table)

    def _await_turn(self) -> None:
        """In an idle group: until there is news here, a member begins a step, or the heartbeat."""
        settings, news = self._tools.settings, self._tools.news
        if self._idle:
            self._council.listen()
            poll = settings.idle_poll_seconds if self.size > 1 else settings.heartbeat_seconds
            deadline = time.monotonic() + settings.heartbeat_seconds
            while time.monotonic() < deadline and not self._council.heard():
                if news.wait(poll):
                    break
        # Cleared before anything is looked at, so that nothing new is missed.
        news.clear()

    def _agree(self, schedule: Schedule, generation_ready: int, draining: int) -> Agreement:
        wave, now, num_tokens = self.wave, time.monotonic(), schedule.num_tokens
        ballot = Ballot(
            step=self.num_steps,
            generation=self.plan.generation,
            epoch_active=self.plan.epoch,
            epoch_ready=wave.epoch if wave and wave.complete else 0,
            epoch_abandoned=wave.epoch if wave and wave.is_hopeless(now) else 0,
            generation_ready=generation_ready,
            num_tokens=num_tokens,
            num_rounds=self._dispatcher.num_rounds([num_tokens]),
            draining=draining,
        )
        # Members come to the first step from different places: the others' old group, a load.
        patience = max(_FIRST_VOTE_SECONDS, self._tools.settings.config.operation_timeout_seconds)
        votes = self._council.vote(ballot, None if self.num_steps else patience)
        self.num_steps += 1
        return decide(votes)

    def _follow(self, agreement: Agreement) -> None:
        wave = self.wave
        if agreement.abandon:
            self.abandoned_epoch = max(self.abandoned_epoch, *agreement.abandon)
        if wave is not None and wave.epoch in agreement.abandon:
            reason = "abandoned by the group: past its deadline, or impossible on some rank"
            self.migration = wave.state(error=wave.error or reason)
            logger.warning("epoch %d: %s", wave.epoch, self.migration.error)
            self.call_off_wave()
        elif agreement.switch_to is not None:
            assert wave is not None, "all ranks voted for this epoch"
            assert wave.epoch == agreement.switch_to, "all ranks voted for this epoch"
            self._switch(wave)

    def _switch(self, wave: Wave) -> None:
        assert wave.table is not None, "only a complete wave is voted for"
        self._loaded.layers.switch(wave.table)
        # From here on the slots that the new table leaves are free to be written.
        self._loaded.bank.in_force_LS = wave.slots_LRS[:, self.rank].copy()
        self.plan, self.slots_LRS, self.wave = wave.plan, wave.slots_LRS, None
        is_busy = self.gaps.switch()
        self.migration = wave.state(stall_millis=None if is_busy else 0.0)
        if not is_busy:
            self._tools.observer.switched(wave.epoch, None)
        logger.info("epoch %d is in force", wave.epoch)

    def _run(self, schedule: Schedule, agreement: Agreement) -> None:
        loaded, observer = self._loaded, self._tools.observer
        self._begin_busy_step()
        started = time.perf_counter()
        loaded.layers.begin_step(agreement.tokens_R)
        try:
            tokens = loaded.runner.run(schedule, loaded.layers)
        except Undrawable as error:
            # Found when sampling, after the last exchange: the others' step is complete.
            self._end_undrawable(error)
            return
        finally:
            self.gaps.end_step(time.monotonic())
        ran = time.perf_counter()
        loaded.layers.commit_step()
        with self._tools.scheduling:
            finished = loaded.scheduler.commit(schedule, tokens)
        self._tell(schedule)
        for seq in finished:
            assert seq.finish_reason is not None, "finished sequences say why"
            self._tools.requests.finish(seq.request_id, seq.finish_reason)
        observer.step("run", ran - started)
        observer.step("publish", time.perf_counter() - ran)

    def _begin_busy_step(self) -> None:
        stall = self.gaps.begin_step(time.monotonic())
        if stall is not None:
            self._note_stall(stall)
            self._tools.observer.switched(self.plan.epoch, stall)

    def _note_stall(self, stall_seconds: float) -> None:
        assert self.migration is not None, "a switch leaves its migration behind"
        self.migration = self.migration.model_copy(update={"stall_millis": stall_seconds * 1e3})

    def _tell(self, schedule: Schedule) -> None:
        requests, draws = self._tools.requests, self._loaded.runner.draws
        num_told = 0
        for seq, start, _, samples, _ in schedule.entries:
            request_id = seq.request_id
            if start < len(seq.prompt):
                prompt_logprobs = draws.prompt_logprobs.get(request_id, ())
                requests.tell_prompt(request_id, prompt_logprobs, done=samples)
            if samples:
                num_told += requests.tell_tokens(request_id, draws.logprobs.get(request_id))
        self._tools.observer.generated(num_told)

    def _end_undrawable(self, error: Undrawable) -> None:
        """End the requests that no token can be drawn for; the others' are computed again."""
        logits = self._loaded.runner.last_logits
        if logits is not None and not bool(logits.isfinite().all()):
            # What was computed on the way there may be as wrong; nobody else shall begin with it.
            with self._tools.scheduling:
                self._loaded.scheduler.blocks.forget()
        for request_id, reason in error.reasons.items():
            with self._tools.scheduling:
                self._loaded.scheduler.abort(request_id)
            self._tools.requests.finish(request_id, "error", reason)
