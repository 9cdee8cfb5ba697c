"""What a rank does in `bench/exchange.py`: swap bytes, run MoE layers, and time each."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moe_api.plan import GroupPlan, SlotsLRS, even_fractions
from moe_api.worker import Carrier
from moe_worker.expert.bank import ExpertBank
from moe_worker.expert.dispatch import Dispatcher, DispatchShape
from moe_worker.expert.exchange import Exchange, LocalExchange
from moe_worker.expert.layer import ExpertLayers
from moe_worker.expert.load import LoadCounters
from moe_worker.expert.routing_table import RoutingTable
from moe_worker.membership import Rendezvous, RendezvousSettings
from tests.support.expert_ranks import random_experts

_exchanges: dict[str, Exchange] = {"alone": LocalExchange()}
_layers: dict[str, ExpertLayers] = {}
ROUNDS_BEFORE, PASSES_BEFORE = 10, 2
"""Not counted."""


@dataclass(frozen=True)
class LayerShape:
    hidden: int = 512
    intermediate: int = 256
    experts: int = 32
    top_k: int = 4
    layers: int = 8
    """Cycled through, so that weights come from memory as in a model."""


def join(plan: GroupPlan, rank: int, carrier: Carrier) -> None:
    settings = RendezvousSettings(20.0, "bench", carrier)
    waiting = threading.Event()
    _exchanges[carrier] = Rendezvous(
        plan, rank, settings, "", waiting.wait, lambda missing: None
    ).run()


def swap(carrier: Carrier, num_bytes: int, repeats: int) -> list[float]:
    """Seconds of each exchange of so many bytes in both directions, between two ranks."""
    exchange = _exchanges[carrier]
    peer = 1 - exchange.rank
    mine = torch.zeros(num_bytes, dtype=torch.uint8)
    theirs = torch.empty_like(mine)
    taken = []
    for _ in range(ROUNDS_BEFORE + repeats):
        started = time.perf_counter()
        exchange.transfer("data", [(peer, mine)], [(peer, theirs)]).wait()
        taken.append(time.perf_counter() - started)
    return taken[ROUNDS_BEFORE:]


def prepare_layers(carrier: str, slots_LRS: SlotsLRS, shape: LayerShape, threads: int) -> None:
    torch.set_num_threads(threads)
    exchange = _exchanges[carrier]
    dtype, slots_per_rank = torch.bfloat16, slots_LRS.shape[2]
    bank = ExpertBank(shape.layers, slots_per_rank, shape.intermediate, shape.hidden, dtype)
    experts = random_experts(
        1, shape.layers, shape.experts, shape.intermediate, shape.hidden, dtype
    )
    for layer, slot in np.argwhere(slots_LRS[:, exchange.rank] >= 0):
        bank.write(layer, slot, experts[layer][slots_LRS[layer, exchange.rank, slot]])
    counters = LoadCounters(shape.layers, shape.experts, slots_per_rank)
    layers = ExpertLayers(bank, counters)
    layers.join(
        Dispatcher(exchange, DispatchShape(shape.hidden, shape.top_k, slots_per_rank, dtype))
    )
    shares = even_fractions(slots_LRS)
    layers.switch(RoutingTable.build(slots_LRS, shares, shape.experts, exchange.rank))
    _layers[carrier] = layers


@dataclass(frozen=True)
class Passes:
    seconds: list[float]
    """Per layer of each pass."""
    cpu_seconds: float
    """Per layer, of all threads of this process: what waiting for a processor does not change."""
    output: torch.Tensor
    """Of the last layer."""


def run_layers(
    carrier: str, tokens_R: Sequence[int], seeds: Sequence[int], shape: LayerShape, repeats: int
) -> Passes:
    """`seeds`: one for each rank's worth of tokens that this process brings."""
    layers = _layers[carrier]
    parts = [_tokens(tokens_R[0] if len(seeds) == 1 else sum(tokens_R) // len(seeds), seed, shape)
             for seed in seeds]  # fmt: skip
    x, ids, weights = (torch.cat(part) for part in zip(*parts, strict=True))
    taken = []
    out, cpu_started = x, 0.0
    for number in range(PASSES_BEFORE + repeats):
        if number == PASSES_BEFORE:
            cpu_started = time.process_time()
        layers.begin_step(tokens_R)
        started = time.perf_counter()
        for layer in range(shape.layers):
            out = layers.run(layer, x, ids, weights)
        taken.append((time.perf_counter() - started) / shape.layers)
        layers.commit_step()
    cpu_seconds = (time.process_time() - cpu_started) / (repeats * shape.layers)
    return Passes(taken[PASSES_BEFORE:], cpu_seconds, out)


def _tokens(count: int, seed: int, shape: LayerShape) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((count, shape.hidden), generator=generator)
    order = torch.rand((count, shape.experts), generator=generator).argsort(dim=1)
    weights = torch.rand((count, shape.top_k), generator=generator)
    return x, order[:, : shape.top_k].contiguous(), weights / weights.sum(dim=1, keepdim=True)
