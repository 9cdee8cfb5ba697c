"""The exchange over torch.distributed's process groups, formed over a store.

Neighbours: `moe_worker.membership` has the store, `exchange.GroupExchange` uses the groups.
"""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from moe_worker.expert.exchange import NcclGroup, PairwiseGroup


def gloo_group(
    store: Store, rank: int, size: int, address: str, timeout: timedelta
) -> PairwiseGroup:
    """Connections from and to the plan's address: the host name's own need not be reachable."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return cast(PairwiseGroup, dist.ProcessGroupGloo(store, rank, size, options))


def nccl_group(store: Store, rank: int, size: int, timeout: timedelta) -> NcclGroup:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return cast(NcclGroup, dist.ProcessGroupNCCL(store, rank, size, options))
