"""How the members of a generation find each other: from a plan to a connected, proven exchange.

`members[0]` hosts a store at its own address; every member puts its ticket there (generation,
epoch, content of the plan) and waits until all tickets are there and equal; then all connect to
each other and prove it by one exchange between every pair. Over TCP a member listens before its
ticket is there, and both ends of a connection prove that they know the secret. So nobody leaves a
working group for one that is not complete: this runs beside the engine, which begins the new
generation when it is told that the exchange stands. Waiting ends by success or by being called off
for a newer plan; meanwhile it says who is missing. A failed attempt is made again under a new
number.

Neighbours: `engine.preparation` runs it in a thread of its own, `expert.tcp_meeting` connects,
`expert.exchange` is the result.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import socket
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from moe_api.names import EXCHANGE_PORT, STORE_PORT
from moe_api.plan import GroupPlan
from moe_api.worker import Carrier
from moe_worker.expert.exchange import Exchange, ExchangeFailed, GroupExchange, LocalExchange
from moe_worker.expert.process_groups import gloo_group, nccl_group
from moe_worker.expert.tcp_exchange import TcpExchange
from moe_worker.expert.tcp_handshake import Party, key_of
from moe_worker.expert.tcp_meeting import Meeting, open_door

logger = logging.getLogger(__name__)

STORE_PORTS = 1000
"""Generations use ports in turn, so that a store that is being left never clashes with the next."""
_POLL_SECONDS = 0.05
_ATTEMPT, _INSTANCE = "attempt", "instance"


@dataclass(frozen=True)
class RendezvousSettings:
    operation_timeout_seconds: float
    """Deadline of one operation of the resulting exchange."""
    secret: str
    """Known to the members alone; over TCP they prove it to each other."""
    carrier: Carrier = "tcp"
    connect_timeout_seconds: float = 30.0
    """Deadline of connecting all pairs once everyone is there."""
    store_timeout_seconds: float = 2.0
    """Deadline of one question to the store."""

    @property
    def device(self) -> str:
        """Where data buffers live."""
        return "cuda" if self.carrier == "nccl" else "cpu"


@dataclass(frozen=True)
class Missing:
    """Why the group is not complete yet."""

    member_ids: tuple[int, ...]
    message: str
    failed: bool = False
    """All were there once, and connecting them failed."""


class Cancelled(Exception):
    """The rendezvous was called off."""


def store_port(generation: int) -> int:
    return STORE_PORT + generation % STORE_PORTS


class Rendezvous:
    """One member's part in forming one generation."""

    def __init__(
        self,
        plan: GroupPlan,
        rank: int,
        settings: RendezvousSettings,
        credentials: str,
        wait: Callable[[float], bool],
        report: Callable[[Missing], None],
    ) -> None:
        """
        Args:
            credentials: what members must have in common besides the plan (shapes, buffer sizes).
            wait: sleeps so many seconds; True as soon as the rendezvous is called off.
            report: told whenever who or what is missing changes.
        """
        self._plan, self._rank, self._settings = plan, rank, settings
        self._wait, self._report = wait, report
        self._told: Missing | None = None
        self._instance = b""
        self._attempt = 0
        self._host, self._own = plan.members[0], plan.members[rank]
        self._place = f"{self._host.address}:{store_port(plan.generation)}"
        self._ticket = f"{plan.content_hash()}/{credentials}/{settings.carrier}".encode()

    def run(self) -> Exchange:
        """Block until the group is connected and proven.

        Raises:
            Cancelled: called off.
        """
        if len(self._plan.members) == 1:
            return LocalExchange()
        if self._settings.carrier != "tcp":
            return self._form(None)
        with self._open_door() as door:
            return self._form(door)

    def _form(self, door: socket.socket | None) -> Exchange:
        store: TCPStore | None = None
        while True:
            try:
                store = store or self._open_store()
                self._gather(store)
                return self._connect(store, door)
            except (RuntimeError, OSError) as error:
                # A pair, a peer or the store failed. The host keeps its store and begins another
                # attempt; the others look for the store anew and wait for that attempt.
                others = [m.id for m in self._plan.members if m.id != self._own.id]
                message = f"forming generation {self._plan.generation} failed: {error}"
                self._tell(Missing(tuple(others), message, failed=True))
                if self._rank == 0 and store is not None:
                    store.add(_ATTEMPT, 1)
                else:
                    store = None
                self._pause()

    def _open_door(self) -> socket.socket:
        """Listen for the other members. The port may still be in use by the preparation that this
        one replaces, or by a process that this one replaces."""
        while True:
            try:
                return open_door(self._own.address, EXCHANGE_PORT)
            except OSError as error:
                place = f"{self._own.address}:{EXCHANGE_PORT}"
                message = f"exchange of generation {self._plan.generation} at {place}: {error}"
                self._tell(Missing((), message))
                self._pause()

    def _open_store(self) -> TCPStore:
        """Host it or reach it, waiting as long as it takes; nothing is tried with a guessed
        address."""
        port = store_port(self._plan.generation)
        timeout = timedelta(seconds=self._settings.store_timeout_seconds)
        while True:
            try:
                if self._rank == 0:
                    # The store takes the listening socket over.
                    descriptor = open_door(self._host.address, port).detach()
                    store = TCPStore(
                        self._host.address, port, None, True, timeout,
                        wait_for_workers=False, master_listen_fd=descriptor,
                    )  # fmt: skip
                    store.set(_INSTANCE, uuid.uuid4().hex)
                    store.add(_ATTEMPT, 1)
                    self._attempt = 0
                    return store
                # A plain connection first: the store's own client retries and logs by itself.
                with socket.create_connection((self._host.address, port), timeout.seconds):
                    pass
                store = TCPStore(
                    self._host.address, port, None, False, timeout, wait_for_workers=False
                )
                self._recognise(store)
                return store
            except (OSError, dist.DistError) as error:
                missing = () if self._rank == 0 else (self._host.id,)
                verb = "cannot be opened" if self._rank == 0 else "does not answer"
                message = (
                    f"store of generation {self._plan.generation} at {self._place} (member "
                    f"{self._host.id}) {verb}: {error}"
                )
                self._tell(Missing(missing, message))
                self._pause()

    def _recognise(self, store: TCPStore) -> None:
        """Attempts are numbered by the store: in another one of the same host they begin anew."""
        instance = store.get(_INSTANCE)
        if instance != self._instance:
            self._instance, self._attempt = instance, 0

    def _gather(self, store: TCPStore) -> None:
        """Wait until every member's ticket for an attempt later than our last equals ours."""
        failed, keys = self._attempt, [""]
        while True:
            current = store.add(_ATTEMPT, 0)
            if current > max(failed, self._attempt):
                self._attempt = current
                keys = [f"ticket/{current}/{rank}" for rank in range(len(self._plan.members))]
                store.set(keys[self._rank], self._ticket.decode())
            if self._attempt > failed:
                absent = [
                    member.id
                    for member, key in zip(self._plan.members, keys, strict=True)
                    if not (store.check([key]) and store.get(key) == self._ticket)
                ]
                if not absent:
                    return
                message = f"waiting at {self._place} for members {absent}"
                self._tell(Missing(tuple(absent), message))
            self._pause()

    def _connect(self, store: TCPStore, door: socket.socket | None) -> Exchange:
        exchange = self._over_groups(store) if door is None else self._over_tcp(store, door)
        with _closed_on_error(exchange):
            prove(exchange, self._ticket, self._settings)
        return exchange

    def _over_tcp(self, store: TCPStore, door: socket.socket) -> Exchange:
        instance = store.get(_INSTANCE)
        session = hashlib.sha256(b"%s/%s/%d" % (self._ticket, instance, self._attempt)).digest()
        size, generation = len(self._plan.members), self._plan.generation
        party = Party(key_of(self._settings.secret), generation, session, self._rank, size)
        addresses = [member.address for member in self._plan.members]
        meeting = Meeting(party, addresses, EXCHANGE_PORT, door, self._check)
        ends = meeting.run(self._settings.connect_timeout_seconds)
        return TcpExchange(self._rank, size, ends, self._settings.operation_timeout_seconds)

    def _over_groups(self, store: TCPStore) -> Exchange:
        prefix = PrefixStore(f"pairs/{self._attempt}", store)
        timeout = timedelta(seconds=self._settings.connect_timeout_seconds)
        size, address = len(self._plan.members), self._own.address
        gloo = gloo_group(prefix, self._rank, size, address, timeout)
        nccl = None
        if self._settings.carrier == "nccl":
            nccl = nccl_group(prefix, self._rank, size, timeout)
        return GroupExchange(gloo, self._settings.operation_timeout_seconds, nccl)

    def _tell(self, missing: Missing) -> None:
        if missing != self._told:
            self._told = missing
            logger.info(missing.message, extra={"generation": self._plan.generation})
            self._report(missing)

    def _check(self) -> None:
        if self._wait(0.0):
            raise Cancelled

    def _pause(self) -> None:
        if self._wait(_POLL_SECONDS):
            raise Cancelled


def prove(exchange: Exchange, ticket: bytes, settings: RendezvousSettings) -> None:
    """One exchange between every pair on each channel: connections are made and warm before the
    first step, and both ends hold the same plan. Counts as nobody's load.

    Raises:
        ExchangeFailed: a pair does not work, or a peer came with another plan.
    """
    digest = hashlib.sha256(ticket).digest()
    peers = [rank for rank in range(exchange.size) if rank != exchange.rank]
    for channel, device in (("control", "cpu"), ("data", settings.device)):
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
        theirs = {peer: torch.empty_like(mine) for peer in peers}
        exchange.transfer(
            "control" if channel == "control" else "data",
            [(peer, mine) for peer in peers],
            list(theirs.items()),
        ).wait(settings.connect_timeout_seconds)
        strangers = [peer for peer, answer in theirs.items() if not torch.equal(answer, mine)]
        if strangers:
            raise ExchangeFailed(f"ranks {strangers} came with another plan", strangers)


@contextlib.contextmanager
def _closed_on_error(exchange: Exchange) -> Iterator[None]:
    try:
        yield
    except BaseException:
        exchange.close()
        raise
