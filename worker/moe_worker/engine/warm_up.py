"""Compiles the kernels that the model needs, in a thread beside everything else a start does.

It begins with the process, so that it is often done when the first plan comes, and it must be done
before this worker joins a group: until then its phase is Loading. A first start compiles for half a
minute and more, later ones load from the cache on disk within a second or two; `progress` is told
in the worker's state, and in the log step by step.
Neighbours: `moe_kernels.warm_up` has the steps, `kernel_needs` what they depend on; who waits is
`loading`.
"""

from __future__ import annotations

import logging
import threading
import time

from moe_api.worker import WarmUpState
from moe_kernels.warm_up import Needs, Step, warm_up_steps
from moe_worker.engine.observer import Observer
from moe_worker.membership import Cancelled

logger = logging.getLogger(__name__)

_STOP_SECONDS = 10.0
_COMPILED_SECONDS = 1.0
"""A step that took longer than this has compiled; it gets a line of its own."""


class WarmUp:
    """`start` once; any thread may read `progress` and `wait`."""

    def __init__(self, needs: Needs, observer: Observer) -> None:
        self._needs, self._observer = needs, observer
        self._lock = threading.Lock()
        self._progress: WarmUpState | None = None
        self._failure: Exception | None = None
        self._stopped, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="warm-up", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the step under way; the compiler cannot be interrupted."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_SECONDS)

    @property
    def progress(self) -> WarmUpState | None:
        """None before there is anything to do, and once all of it is done."""
        with self._lock:
            return self._progress

    def wait(self) -> None:
        """Until all kernels are there. The wait ends with the thread, which ends with the last step
        or at its failure.

        Raises:
            Cancelled: the worker stops.
            Exception: what a step failed with.
        """
        self._over.wait()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._go_through(warm_up_steps(self._needs))
        except Cancelled as error:
            self._failure = error
        except Exception as error:
            # Handed to whoever waits: a thread has nobody above it.
            logger.exception("the kernels cannot be made ready")
            self._failure = error
        finally:
            self._over.set()

    def _go_through(self, steps: list[Step]) -> None:
        begin_seconds = time.monotonic()
        if steps:
            logger.info(
                "warming up %d kinds of kernels; a first start on this machine compiles them, "
                "which takes half a minute and more",
                len(steps),
            )
        for done, step in enumerate(steps):
            self._tell(WarmUpState(done=done, total=len(steps), step=step.name))
            if self._stopped.is_set():
                raise Cancelled
            step_seconds = time.monotonic()
            step.run()
            seconds = time.monotonic() - step_seconds
            if seconds >= _COMPILED_SECONDS:
                logger.info(
                    "kernels: %s ready after %.1f s (%d of %d)",
                    step.name, seconds, done + 1, len(steps),
                )  # fmt: skip
        self._tell(None)
        seconds = time.monotonic() - begin_seconds
        if steps:
            logger.info("all kernels are ready after %.1f s", seconds)
        self._observer.warmed_up(seconds)

    def _tell(self, progress: WarmUpState | None) -> None:
        with self._lock:
            self._progress = progress
