"""Leadership by a coordination.k8s.io Lease: one active operator, and a fence for all its writes.

`Lease` is the thread around `Election`. `may_write` is asked by `cluster` before every write;
`main` starts to reconcile when `on_elected` is called and ends the process on `on_lost`. The
lease's own requests are not fenced and do not wait in the rate limit.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable

from moe_operator.api_server import ApiServer
from moe_operator.context import Clock
from moe_operator.election import Election, Record
from moe_operator.errors import Conflict, Missing, OperatorError, TemporaryError
from moe_operator.resources import RESOURCES
from moe_operator.settings import LeaseSettings

logger = logging.getLogger(__name__)


class Lease:
    """Runs from `start` to `stop`, or until leadership was held and lost."""

    def __init__(
        self,
        api: ApiServer,
        settings: LeaseSettings,
        identity: str,
        clock: Clock,
        on_elected: Callable[[int], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._api, self._settings, self._clock = api, settings, clock
        self._on_elected, self._on_lost = on_elected, on_lost
        self._election = Election(identity, settings)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._lost = False
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        resource = RESOURCES["Lease"]
        self._list_path = resource.path(settings.namespace)
        self._path = resource.path(settings.namespace, settings.name)

    @property
    def identity(self) -> str:
        return self._election.identity

    def start(self) -> None:
        self._thread.start()

    def may_write(self) -> bool:
        """Whether this process leads now; never True again once it was lost."""
        with self._lock:
            return not self._lost and self._election.holds(self._clock.monotonic())

    def stop(self, deadline_seconds: float) -> None:
        """Stop to renew, then hand the lease over; call it when nothing writes any more."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(deadline_seconds)
        if self._thread.is_alive() or not self.may_write():
            return
        with self._lock:
            self._lost = True
            released = self._election.release()
        try:
            self._put(released)
        except OperatorError as error:
            logger.info("lease not released, a standby waits for its end: %s", error)

    def _run(self) -> None:
        try:
            if self._campaign():
                self._reign()
        except OperatorError as error:  # not temporary: forbidden, or no such namespace
            self._give_up(f"lease {self._path} cannot be used: {error}")

    def _campaign(self) -> bool:
        """Wait until this process leads; False when it is stopped before."""
        while not self._stopping.is_set():
            try:
                transitions = self._try_to_win()
            except TemporaryError as error:
                logger.info("lease not readable, trying again: %s", error)
            else:
                if transitions is not None:
                    logger.info("leading as %s", self.identity)
                    self._on_elected(transitions)
                    return True
            self._stopping.wait(self._settings.retry_seconds)
        return False

    def _try_to_win(self) -> int | None:
        """Transitions of the lease when it was just won, None when another has it."""
        stored = self._read()
        sent_at = self._clock.monotonic()
        with self._lock:
            self._election.observe(stored, sent_at)
            claim = self._election.claim(stored, sent_at, self._clock.wall())
        if claim is None:
            return None
        try:
            written = self._put(claim) if claim.version else self._create(claim)
        except Conflict:  # another candidate was faster
            return None
        with self._lock:
            self._election.won(written, sent_at)
        return written.transitions

    def _reign(self) -> None:
        """Renew until stopped or lost."""
        while not self._stopping.wait(self._settings.retry_seconds):
            sent_at = self._clock.monotonic()
            with self._lock:
                renewal = self._election.renewal(self._clock.wall())
            try:
                written = self._put(renewal)
            except Conflict:
                stored = self._read_or_none()
                with self._lock:
                    still_mine = self._election.adopt(stored)
                if stored is not None and not still_mine:
                    return self._give_up(f"the lease now belongs to {stored.holder or 'nobody'}")
            except TemporaryError as error:
                logger.info("lease not renewed, trying again: %s", error)
            else:
                with self._lock:
                    self._election.renewed(written, sent_at)
            if not self.may_write():
                return self._give_up(
                    f"the lease was not renewed for {self._settings.renew_deadline_seconds} s"
                )

    def _give_up(self, why: str) -> None:
        with self._lock:
            self._lost = True
        self._on_lost(why)

    def _read_or_none(self) -> Record | None:
        """Like `_read`, None also while the API server does not answer."""
        try:
            return self._read()
        except TemporaryError:
            return None

    def _read(self) -> Record | None:
        try:
            answer = self._api.request("GET", self._path, timeout_seconds=self._patience)
        except Missing:
            return None
        return Record.from_wire(json.loads(answer))

    def _put(self, record: Record) -> Record:
        return self._send("PUT", self._path, record)

    def _create(self, record: Record) -> Record:
        return self._send("POST", self._list_path, record)

    def _send(self, method: str, path: str, record: Record) -> Record:
        body = record.to_wire(self._settings.namespace, self._settings.name)
        answer = self._api.request(method, path, body=body, timeout_seconds=self._patience)
        return Record.from_wire(json.loads(answer))

    @property
    def _patience(self) -> float:
        """One request may take half of the renew deadline, so that a second one fits."""
        return self._settings.renew_deadline_seconds / 2
