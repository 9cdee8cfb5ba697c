"""Run a whole expert-parallel group on this machine, without Kubernetes.

Each rank is a worker process of its own, with the same server, engine and plans as in a cluster:
member i serves OpenAI's API at http://127.0.0.(2+i):8000. This process plays the operator: it
forms the group, watches it, rebalances by the operator's own decision function, goes on with the
survivors when a rank dies and brings it back. Ctrl-C drains and ends everything.
"""

from __future__ import annotations

import argparse
import ipaddress
from pathlib import Path
from typing import get_args

from moe_api.worker import KvConfig
from moe_placement.decision.policy import Mode

KV_CHOICES = get_args(KvConfig.model_fields["dtype"].annotation)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", type=Path, required=True, metavar="DIR",
        help="folder in the hub's layout: config.json, *.safetensors, tokenizer.json",
    )  # fmt: skip
    model.add_argument("--name", help="model name in the API (default: the folder's name)")
    model.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto",
        help="weights are held in this dtype (default: the checkpoint's)",
    )  # fmt: skip
    model.add_argument(
        "--kv", choices=KV_CHOICES, default="nvfp4",
        help="format of the KV cache (default: %(default)s)",
    )  # fmt: skip
    group = parser.add_argument_group("group")
    group.add_argument(
        "--ranks", type=_positive, default=3, metavar="N", help="default: %(default)s"
    )
    group.add_argument(
        "--redundant-slots", type=_natural, default=1, metavar="N",
        help="serving slots a rank beyond experts / ranks (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--spare-slots", type=_natural, default=1, metavar="N",
        help="slots a rank for experts on their way (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--network", type=_network, default="127.0.0", metavar="A.B.C",
        help="loopback network of the ranks, so that groups can stand side by side "
        "(default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--threads", type=_positive, default=1, help="of each rank; default: 1")
    group.add_argument(
        "--kernels", choices=("auto", "cpu", "reference"), default="auto",
        help="whose operations compute; default: auto, those compiled for this processor",
    )  # fmt: skip
    rebalancing = parser.add_argument_group("rebalancing")
    rebalancing.add_argument(
        "--rebalance", choices=[mode.value for mode in Mode], default=Mode.AUTO.value,
        help="default: %(default)s",
    )  # fmt: skip
    for flag, default, meaning in (
        ("--interval-seconds", 5.0, "between two decisions"),
        ("--window-seconds", 30.0, "of load that a decision looks at"),
        ("--cooldown-seconds", 15.0, "after a rebalance"),
        ("--min-gain-percent", 5.0, "that a rebalance must promise"),
    ):
        rebalancing.add_argument(
            flag, type=_seconds, default=default, metavar="X",
            help=f"{meaning} (default: %(default)g)",
        )  # fmt: skip
    parser.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="logs of the ranks (default: a new folder)"
    )


def run(parsed: argparse.Namespace) -> int:
    """Serve until interrupted; returns the exit code."""
    from moe_worker.local.group import Options, run_group

    return run_group(
        Options(
            model=parsed.model,
            name=parsed.name or parsed.model.resolve().name,
            dtype=parsed.dtype,
            kv=parsed.kv,
            ranks=parsed.ranks,
            redundant_slots=parsed.redundant_slots,
            spare_slots=parsed.spare_slots,
            network=parsed.network,
            threads=parsed.threads,
            kernels=parsed.kernels,
            mode=Mode(parsed.rebalance),
            interval_seconds=parsed.interval_seconds,
            window_seconds=parsed.window_seconds,
            cooldown_seconds=parsed.cooldown_seconds,
            min_gain_percent=parsed.min_gain_percent,
            log_dir=parsed.log_dir,
        )
    )


def _positive(text: str) -> int:
    return _at_least(text, 1)


def _natural(text: str) -> int:
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is less than {least}")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0")
    return number


def _network(text: str) -> str:
    try:
        is_loopback = ipaddress.IPv4Address(f"{text}.2").is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 127.0.0")
    return text
