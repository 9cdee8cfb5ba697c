"""What a run is asked for, checked, and how its report tells it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_worker.bench.arrivals import ClosedLoop, OpenLoop, Traffic
from moe_worker.bench.lengths import Lengths
from moe_worker.bench.objective import Objective
from moe_worker.bench.prompts import Synthetic
from moe_worker.bench.target import Endpoint, Sampling


@dataclass(frozen=True)
class Options:
    base_url: str
    model: str | None
    """None = the first that the server lists."""
    api_key: str | None
    endpoint: Endpoint
    sampling: Sampling
    traffic: Traffic
    num_requests: int
    duration_seconds: float
    prompts: Path | Synthetic
    max_tokens: Lengths
    seed: int
    warmup: int
    timeout_seconds: float
    max_retries: int
    objective: Objective
    json_path: Path | None
    """`-` = standard output, and the table goes to standard error."""
    allow_failures: bool

    def setting(self, model: str) -> dict[str, Any]:
        """As JSON values, with the model that was measured. The key is no part of it."""
        return {
            "url": self.base_url,
            "model": model,
            "endpoint": self.endpoint.value,
            "traffic": _traffic(self.traffic),
            "max_requests": self.num_requests,
            "duration_seconds": self.duration_seconds,
            "prompts": _prompts(self.prompts),
            "max_tokens": str(self.max_tokens),
            "temperature": self.sampling.temperature,
            "ignore_eos": self.sampling.ignore_eos,
            "seed": self.seed,
            "warmup": self.warmup,
            "timeout_seconds": self.timeout_seconds,
            "max_retries": self.max_retries,
            "ttft_objective_seconds": self.objective.ttft_seconds,
            "itl_objective_seconds": self.objective.itl_seconds,
        }


def _traffic(traffic: Traffic) -> dict[str, Any]:
    match traffic:
        case OpenLoop(rate, connections):
            return {"rate_per_second": rate, "max_connections": connections}
        case ClosedLoop(concurrency):
            return {"concurrency": concurrency}


def _prompts(prompts: Path | Synthetic) -> dict[str, Any]:
    if isinstance(prompts, Path):
        return {"file": str(prompts)}
    return {
        "prompt_tokens": str(prompts.prompt_tokens),
        "shared_prefix_tokens": prompts.shared_prefix_tokens,
    }
