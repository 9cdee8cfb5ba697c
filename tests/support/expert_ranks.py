"""What a rank does in tests of the expert layer: join a group, run a layer, report what it saw."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_api.plan import GroupPlan, Member, SlotsLRS, encode_layers, even_fractions
from moe_api.worker import Carrier
from moe_worker.expert.bank import ExpertBank
from moe_worker.expert.dispatch import Dispatcher, DispatchShape
from moe_worker.expert.exchange import Exchange, ExchangeFailed, LocalExchange
from moe_worker.expert.layer import ExpertLayers
from moe_worker.expert.load import LoadCounters
from moe_worker.expert.routing_table import RoutingTable
from moe_worker.membership import Cancelled, Missing, Rendezvous, RendezvousSettings
from moe_worker.model.weights import ExpertWeights

_exchange: Exchange = LocalExchange()
_told: list[Missing] = []
_joining: threading.Thread | None = None
_called_off = threading.Event()


def plan_for(addresses: Sequence[str], generation: int, slots_LRS: SlotsLRS) -> GroupPlan:
    members = [
        Member(id=i, pod=f"pod-{i}", uid=f"uid-{i}", address=address, incarnation=f"inc-{i}")
        for i, address in enumerate(addresses)
    ]
    return GroupPlan(
        namespace="test", deployment="test", group=0, leader_epoch=1, generation=generation,
        epoch=1, members=members, layers=encode_layers(slots_LRS),
    ).sealed()  # fmt: skip


def join(
    plan: GroupPlan,
    rank: int,
    timeout_seconds: float = 20.0,
    carrier: Carrier = "tcp",
    secret: str = "secret",
) -> int:
    """Form the group and keep its exchange for what follows."""
    global _exchange
    _exchange.close()
    called_off = threading.Event()
    settings = RendezvousSettings(timeout_seconds, secret, carrier)
    _exchange = Rendezvous(plan, rank, settings, "", called_off.wait, lambda missing: None).run()
    return _exchange.size


def begin_to_join(plan: GroupPlan, rank: int, secret: str = "secret") -> None:
    """`join` in a thread of its own, which ends when the group is formed or `give_up` is called."""
    global _joining

    def run() -> None:
        global _exchange
        settings = RendezvousSettings(20.0, secret, connect_timeout_seconds=1.0)
        rendezvous = Rendezvous(plan, rank, settings, "", _called_off.wait, _told.append)
        with contextlib.suppress(Cancelled):
            _exchange = rendezvous.run()

    leave()
    _told.clear()
    _called_off.clear()
    _joining = threading.Thread(target=run)
    _joining.start()


def joined() -> int:
    """Wait for what `begin_to_join` began; the size of the group."""
    assert _joining is not None
    _joining.join(20)
    assert not _joining.is_alive()
    return _exchange.size


def give_up() -> None:
    _called_off.set()
    assert joined() == 1, "no group was formed"


def told() -> list[Missing]:
    """What the rendezvous said about who is missing and why, so far."""
    return list(_told)


def cut(address: str) -> int:
    """Shut down every TCP connection with `address`, as a broken network would; how many."""
    number = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            end = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with end:
            try:
                is_wanted = end.getpeername()[0] == address
            except (OSError, IndexError):
                continue
            if is_wanted:
                end.shutdown(socket.SHUT_RDWR)
                number += 1
    return number


def leave() -> None:
    global _exchange
    _exchange.close()
    _exchange = LocalExchange()


def random_experts(seed: int, num_layers: int, num_experts: int, intermediate: int, hidden: int,
                   dtype: torch.dtype) -> list[list[ExpertWeights]]:  # fmt: skip
    """[layer][expert], the same in every process."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / hidden**0.5).to(dtype)

    return [
        [ExpertWeights(draw(2 * intermediate, hidden), draw(hidden, intermediate))
         for _ in range(num_experts)]
        for _ in range(num_layers)
    ]  # fmt: skip


def run_layers(
    slots_LRS: SlotsLRS,
    batches: Sequence[dict[str, Tensor]],
    *,
    seed: int = 7,
    intermediate: int = 24,
    dtype: torch.dtype = torch.float32,
    tokens_per_round: int = 512,
    overlap_tokens: int = 64,
    num_experts: int = 8,
    shares_QLRS: np.ndarray | None = None,
) -> dict[str, Any]:
    """Run each batch through layer 0, 1, … in turn with the choices given.

    `shares_QLRS`: per sending rank Q its shares of the copies; absent = even.
    A batch has `x` [T, H], `ids` [T, K], `weights` [T, K] and `tokens` [R].
    Returns the outputs, and what was counted.
    """
    hidden = batches[0]["x"].shape[1]
    num_layers, _, slots_per_rank = slots_LRS.shape
    experts = random_experts(seed, num_layers, num_experts, intermediate, hidden, dtype)
    bank = ExpertBank(num_layers, slots_per_rank, intermediate, hidden, dtype)
    for layer, slot in np.argwhere(slots_LRS[:, _exchange.rank] >= 0):
        bank.write(layer, slot, experts[layer][slots_LRS[layer, _exchange.rank, slot]])
    counters = LoadCounters(num_layers, num_experts, slots_per_rank)
    top_k = batches[0]["ids"].shape[1]
    layers = ExpertLayers(bank, counters)
    shape = DispatchShape(hidden, top_k, slots_per_rank, dtype, tokens_per_round, overlap_tokens)
    layers.join(Dispatcher(_exchange, shape))
    rank = _exchange.rank
    shares = even_fractions(slots_LRS) if shares_QLRS is None else shares_QLRS[rank]
    layers.switch(RoutingTable.build(slots_LRS, shares, num_experts, rank))
    outputs = []
    for batch in batches:
        layers.begin_step(batch["tokens"].tolist())
        for layer in range(num_layers):
            outputs.append(layers.run(layer, batch["x"], batch["ids"], batch["weights"]))
        layers.commit_step()
    counts = counters.snapshot()
    return {"outputs": outputs, "routed": counts.routed_LE, "served": counts.served_LS,
            "invalid": counts.invalid_expert_ids}  # fmt: skip


def trace_dispatch(
    physical_TK: Tensor, tokens: Sequence[int], slots_per_rank: int, tokens_per_round: int
) -> dict[str, Any]:
    """Send rows that say where they come from through experts that say where they are.

    Returns per choice what came back ([T, 4]: source rank, source token, rank, slot), and of how
    many tokens of each rank this rank received rows.
    """
    own, (num_tokens, top_k) = _exchange.rank, physical_TK.shape
    x_TH = torch.zeros((num_tokens, 4))
    x_TH[:, 0], x_TH[:, 1] = own, torch.arange(num_tokens)
    shape = DispatchShape(4, top_k, slots_per_rank, torch.float32, tokens_per_round, 8)
    dispatcher = Dispatcher(_exchange, shape)
    came_back = []
    seen: set[tuple[float, ...]] = set()
    for choice in range(top_k):
        one_hot_TK = torch.zeros((num_tokens, top_k))
        one_hot_TK[:, choice] = 1.0
        batch = dispatcher.begin(x_TH, physical_TK, one_hot_TK, tokens)
        for piece in batch.pieces():
            y_PH = piece.rows_PH.clone()
            y_PH[:, 2] = own
            for slot, (start, end) in enumerate(itertools.pairwise(piece.offsets.tolist())):
                y_PH[start:end, 3] = slot
            seen |= {tuple(row[:2]) for row in piece.rows_PH.tolist()}
            batch.combine(piece, y_PH)
        came_back.append(batch.finish())
    received = [sum(source == rank for source, _ in seen) for rank in range(_exchange.size)]
    return {"came_back": came_back, "received": received}


def agree_once(value: int, timeout_seconds: float) -> list[int]:
    """Swap one byte with everybody; raises ExchangeFailed."""
    mine = torch.tensor([value], dtype=torch.uint8)
    theirs = {p: torch.empty_like(mine) for p in range(_exchange.size) if p != _exchange.rank}
    _exchange.transfer("control", [(p, mine) for p in theirs], list(theirs.items())).wait(
        timeout_seconds
    )
    return [int(theirs[p][0]) if p in theirs else value for p in range(_exchange.size)]


def survive_agreements(timeout_seconds: float) -> dict[str, Any]:
    """Agree until it fails, close at once; says whom it failed on and how long the last took."""
    while True:
        started = time.monotonic()
        try:
            agree_once(_exchange.rank, timeout_seconds)
        except ExchangeFailed as error:
            took = time.monotonic() - started
            leave()
            return {"suspects": error.suspects, "seconds": took, "message": str(error)}
