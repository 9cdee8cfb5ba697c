"""`moe-operator run`: the only file that knows Kopf, which here watches and nothing else.

Every handler is an `on.event` that hands the event to `intake`: that kind leaves no annotation and
no finalizer on any object, and Kopf retries none of them, so all work is done below our own queue.
Kopf runs in a thread with a loop of its own; the process (`process`) outlives it only to end well.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import kopf

from moe_api import logs, names
from moe_operator import arguments
from moe_operator.cluster import ApiServer, connect, endpoint, load_credentials
from moe_operator.errors import SetupError
from moe_operator.process import WATCHED_KINDS, Process, Reconcile, system_clock
from moe_operator.resources import RESOURCES
from moe_operator.settings import Settings, WatchSettings

LABELLED_KINDS = ("Pod", "Service", "ConfigMap", "PodDisruptionBudget", names.PLACEMENT_KIND)
"""Kinds of which only ours are watched, selected by the API server."""
CHATTY = ("kopf.objects", "httpx", "httpcore", "urllib3", "asyncio")
"""Loggers with a line for every event or request."""
STOP_SECONDS = 5.0
logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments.parse(sys.argv[1:] if argv is None else argv)
    logs.configure(options.log_level)
    from moe_operator.reconcile import reconcile  # after --help; the shell needs no brain

    try:
        return run(arguments.settings_from(options), reconcile)
    except SetupError as error:
        logger.error("%s", error)
        return 2


def run(settings: Settings, reconcile: Reconcile) -> int:
    """From start to end; the exit code is 0 only when the end was asked for."""
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    clock = system_clock()
    api = ApiServer(
        connect(load_credentials(settings.kubeconfig)), settings.client, clock.monotonic
    )
    process = Process(settings, api, arguments.identity(), clock, reconcile)
    process.check_setup()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: process.end(0, signal.Signals(got).name))
    watcher = Watcher(process)
    process.start()
    watcher.start()
    exit_code = process.wait()
    process.stop()
    watcher.stop()
    return exit_code


class Watcher:
    """Kopf in its own thread; when it ends unasked, the process ends."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._stopping = False
        self._stop_kopf: Callable[[], object] = lambda: None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kopf", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        if self._begun.wait(STOP_SECONDS):
            self._stop_kopf()
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        finally:
            if not self._stopping:
                self._process.end(1, "the watcher ended")

    async def _watch(self) -> None:
        # A flag of this loop: for one of threads Kopf keeps a thread waiting, and a failed Kopf
        # would never return because of it.
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        self._stop_kopf = lambda: loop.call_soon_threadsafe(stop.set)
        self._begun.set()
        namespaces = self._process.settings.namespaces
        await kopf.operator(
            registry=build_registry(self._process),
            settings=kopf_settings(self._process.settings.watches),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            stop_flag=stop,
        )


def kopf_settings(watches: WatchSettings) -> kopf.OperatorSettings:
    """Everything that Kopf would otherwise decide by default, and a silent stream as a fault."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # our kinds are there (check_setup): no watch of all CRDs
    settings.watching.server_timeout = watches.server_timeout_seconds
    settings.watching.client_timeout = watches.server_timeout_seconds + 30.0
    settings.watching.connect_timeout = 5.0
    settings.watching.inactivity_timeout = watches.inactivity_seconds
    settings.watching.reconnect_backoff = 0.5
    settings.networking.request_timeout = 60.0
    settings.networking.connect_timeout = 5.0
    settings.networking.error_backoffs = (1, 1, 2, 3, 5, 8, 13, 21, 34, 55)
    settings.networking.enforce_retry_after = True
    settings.networking.trust_env = False
    settings.process.ultimate_exiting_timeout = None  # `run` ends the process
    for kind in LABELLED_KINDS:
        resource = RESOURCES[kind]
        settings.watching.label_selectors[resource.group, resource.version, resource.plural] = (
            names.LABEL_DEPLOYMENT
        )
    return settings


def build_registry(process: Process) -> kopf.OperatorRegistry:
    """The handlers: a key for the queue from every event, nothing else."""
    registry = kopf.OperatorRegistry()
    intake = process.intake

    async def deployment(type: str | None, namespace: str, name: str, **_: Any) -> None:
        intake.deployment(type, namespace, name)

    async def child(event: Any, **_: Any) -> None:
        intake.child(event["type"], event["object"])

    async def node(event: Any, **_: Any) -> None:
        intake.node(event["type"], event["object"])

    special = {names.DEPLOYMENT_KIND: deployment, "Node": node}
    for kind in WATCHED_KINDS:
        resource = RESOURCES[kind]
        kopf.on.event(
            resource.group, resource.version, resource.plural, registry=registry, id=kind
        )(special.get(kind, child))

    async def login(**_: Any) -> kopf.AiohttpSession:
        return open_session(process)

    kopf.on.login(registry=registry, id="login")(login)
    return registry


def open_session(process: Process) -> kopf.AiohttpSession:
    """A session with our own credentials, read anew, that reports every answer to a watch."""
    told = endpoint(load_credentials(process.settings.kubeconfig))
    connection = kopf.ConnectionInfo(
        server=told.server,
        ca_path=told.ca_path,
        insecure=not told.verify,
        certificate_path=told.certificate_path,
        private_key_path=told.private_key_path,
    )
    headers = {"User-Agent": names.FIELD_MANAGER}
    if told.authorization:
        headers["Authorization"] = told.authorization
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=connection.as_ssl_context()),
        headers=headers,
        trace_configs=[trace(process.watches.answered, process.intake.relisted)],
    )
    return kopf.AiohttpSession(server=told.server, aiohttp_session=session)


def trace(
    answered: Callable[[str, int, bool], str | None], relisted: Callable[[], None]
) -> aiohttp.TraceConfig:
    """Tell the freshness of watches from the answers' heads, and ask for passes after a LIST."""

    async def request_ended(_: Any, __: Any, answer: aiohttp.TraceRequestEndParams) -> None:
        url = answer.url
        if answered(url.path, answer.response.status, url.query.get("watch") == "true"):
            relisted()

    config = aiohttp.TraceConfig()
    config.on_request_end.append(request_ended)
    return config
