"""The flags of `moe-worker bench`, and the options that they make.

Neighbours: `flags` reads their values, `options` is what comes of them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from moe_kernels.implementation import NAMES
from moe_worker.bench.arrivals import ClosedLoop, OpenLoop
from moe_worker.bench.bench_error import BenchError
from moe_worker.bench.flags import checked, number, whole
from moe_worker.bench.lengths import parse_lengths
from moe_worker.bench.objective import Objective
from moe_worker.bench.options import Options
from moe_worker.bench.prompts import Synthetic
from moe_worker.bench.target import Endpoint, Sampling, parse_url

if TYPE_CHECKING:
    from moe_worker.bench.profile import ProfileOptions

ENV_API_KEY = "OPENAI_API_KEY"
KV_FORMATS = ("auto", "fp32", "bf16", "fp8", "k8v4", "nvfp4", "mxfp4")
MAX_REQUESTS = 10_000_000
MAX_CONNECTIONS = 4096
MAX_SECONDS = 7 * 86400.0
DEFAULT_REQUESTS = 100
DEFAULT_CONCURRENCY = 8
DEFAULT_CONNECTIONS = 256
DEFAULT_DURATION_SECONDS = 3600.0
EXAMPLES = """\
examples:
  moe-worker bench --url http://127.0.0.2:8000 --concurrency 16 --requests 200
  moe-worker bench --url http://127.0.0.2:8000 --rate 4 --duration 60 \\
      --prompt-tokens uniform:50,400 --max-tokens uniform:16,128 --shared-prefix-tokens 40 \\
      --slo-ttft-ms 500 --slo-itl-ms 50 --json result.json
  moe-worker bench --profile --model examples/tiny-moe
"""


def add_arguments(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    parser.epilog = EXAMPLES
    parser.set_defaults(environment_key=environment.get(ENV_API_KEY))
    _add_server(parser)
    _add_traffic(parser)
    _add_prompts(parser)
    _add_results(parser)
    _add_profile(parser)


def _add_server(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--url", type=checked(parse_url), help="http://host:port, /v1 may follow")
    server.add_argument(
        "--model", help="default: the first of /v1/models; with --profile a model's folder"
    )
    server.add_argument(
        "--endpoint", choices=[endpoint.value for endpoint in Endpoint],
        default=Endpoint.COMPLETIONS.value, help="default: %(default)s",
    )  # fmt: skip
    keys = server.add_mutually_exclusive_group()
    keys.add_argument("--api-key", metavar="KEY", help=f"default: {ENV_API_KEY}, if set")
    keys.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="the same, unseen by other users"
    )
    server.add_argument(
        "--timeout", type=number(0.001, 86400), default=120.0, metavar="SECONDS",
        help="of a request, from when it is due (default: %(default)g)",
    )  # fmt: skip
    server.add_argument(
        "--retries", type=whole(0, 100), default=0, metavar="N",
        help="send a request that got 429 or 503 with Retry-After again, when the server said, up "
        "to N times; it still counts from when it was due (default: 0, it counts as refused)",
    )  # fmt: skip


def _add_traffic(parser: argparse.ArgumentParser) -> None:
    traffic = parser.add_argument_group("traffic")
    loops = traffic.add_mutually_exclusive_group()
    loops.add_argument(
        "--concurrency", type=whole(1, MAX_CONNECTIONS), metavar="N",
        help=f"closed loop (default: {DEFAULT_CONCURRENCY})",
    )  # fmt: skip
    loops.add_argument(
        "--rate", type=number(1e-6, 1e5), metavar="R", help="open loop, requests a second"
    )
    traffic.add_argument(
        "--max-connections", type=whole(1, MAX_CONNECTIONS), metavar="N",
        help=f"requests under way at once with --rate (default: {DEFAULT_CONNECTIONS})",
    )  # fmt: skip
    traffic.add_argument(
        "--requests", type=whole(1, MAX_REQUESTS), metavar="N",
        help=f"default: {DEFAULT_REQUESTS}, or as many as come within --duration",
    )  # fmt: skip
    traffic.add_argument(
        "--duration", type=number(0.001, MAX_SECONDS), metavar="SECONDS",
        help="start no request later than that "
        f"(default: {DEFAULT_DURATION_SECONDS:g}); what is under way then is waited for",
    )  # fmt: skip
    traffic.add_argument(
        "--warmup", type=whole(0, MAX_REQUESTS), default=0, metavar="N",
        help="requests before, that are not measured (default: %(default)s)",
    )  # fmt: skip
    traffic.add_argument(
        "--seed", type=whole(0, 2**63 - 1), default=0, metavar="N",
        help="of arrivals, prompts and lengths (default: %(default)s)",
    )  # fmt: skip


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    prompts = parser.add_argument_group("prompts and answers")
    prompts.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help="a prompt a line; in *.jsonl an object a line with `prompt` or `messages`, and "
        "perhaps `max_tokens` (default: synthetic prompts of random words)",
    )  # fmt: skip
    prompts.add_argument(
        "--prompt-tokens", type=checked(parse_lengths), metavar="LENGTH",
        help="of synthetic prompts, about: 128 or uniform:64,256 (default: 128)",
    )  # fmt: skip
    prompts.add_argument(
        "--shared-prefix-tokens", type=whole(0, 1_000_000), metavar="N",
        help="with which all synthetic prompts begin alike (default: 0)",
    )  # fmt: skip
    prompts.add_argument(
        "--max-tokens", type=checked(parse_lengths), default=parse_lengths("64"),
        metavar="LENGTH", help="of answers, likewise (default: %(default)s)",
    )  # fmt: skip
    prompts.add_argument(
        "--ignore-eos", action="store_true",
        help="ask for answers of exactly --max-tokens, where the server has this field",
    )  # fmt: skip
    prompts.add_argument(
        "--temperature", type=number(0, 2), default=0.0, metavar="X", help="default: %(default)g"
    )
    prompts.add_argument(
        "--no-usage", action="store_true",
        help="do not ask for usage, for servers that refuse stream_options",
    )  # fmt: skip


def _add_results(parser: argparse.ArgumentParser) -> None:
    results = parser.add_argument_group("results")
    results.add_argument(
        "--slo-ttft-ms", type=number(0, 1e9), metavar="MS",
        help="count as goodput only answers whose first text came within MS",
    )  # fmt: skip
    results.add_argument(
        "--slo-itl-ms", type=number(0, 1e9), metavar="MS",
        help="… and whose tokens after the first took MS on average at most",
    )  # fmt: skip
    results.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures there; - = standard output"
    )
    results.add_argument(
        "--allow-failures", action="store_true", help="exit with 0 even if requests failed"
    )


def _add_profile(parser: argparse.ArgumentParser) -> None:
    profile = parser.add_argument_group("profile", "of these flags it heeds --model and --json too")
    profile.add_argument(
        "--profile", action="store_true", help="where a step goes, in this process; needs --model"
    )
    profile.add_argument(
        "--threads", type=whole(1, 1024), default=os.cpu_count() or 1, metavar="N",
        help="of a kernel (default: %(default)s, all of this machine)",
    )  # fmt: skip
    profile.add_argument(
        "--kv",
        choices=KV_FORMATS,
        default="nvfp4",
        help="format of the cache (default: %(default)s)",
    )
    profile.add_argument(
        "--kernels", choices=("auto", *NAMES), default="auto",
        help="whose operations compute (default: the fastest that runs here)",
    )  # fmt: skip


def profile_options_of(parsed: argparse.Namespace) -> ProfileOptions:
    """Raises BenchError, naming the flag."""
    from moe_worker.bench.profile import ProfileOptions

    if parsed.url is not None:
        raise BenchError("--profile measures no server: leave --url out")
    if parsed.model is None:
        raise BenchError("--profile needs --model, the folder of a model")
    return ProfileOptions(Path(parsed.model), parsed.kv, parsed.kernels, parsed.threads)


def options_of(parsed: argparse.Namespace) -> Options:
    """Flags that make sense alone, checked against each other.

    Raises:
        BenchError: naming the flag, and the way out.
    """
    if parsed.url is None:
        raise BenchError("--url is missing: the server to measure, as in http://127.0.0.2:8000")
    if parsed.rate is None and parsed.max_connections is not None:
        raise BenchError("--max-connections is for --rate; --concurrency has as many as users")
    num_requests = parsed.requests
    if num_requests is None:
        num_requests = DEFAULT_REQUESTS if parsed.duration is None else MAX_REQUESTS
    concurrency = parsed.concurrency or DEFAULT_CONCURRENCY
    connections = parsed.max_connections or DEFAULT_CONNECTIONS
    return Options(
        base_url=parsed.url,
        model=parsed.model,
        api_key=_api_key(parsed),
        endpoint=Endpoint(parsed.endpoint),
        sampling=Sampling(parsed.temperature, parsed.ignore_eos, not parsed.no_usage),
        traffic=(
            ClosedLoop(concurrency) if parsed.rate is None else OpenLoop(parsed.rate, connections)
        ),
        num_requests=num_requests,
        duration_seconds=parsed.duration or DEFAULT_DURATION_SECONDS,
        prompts=_prompts(parsed),
        max_tokens=parsed.max_tokens,
        seed=parsed.seed,
        warmup=parsed.warmup,
        timeout_seconds=parsed.timeout,
        max_retries=parsed.retries,
        objective=Objective(_seconds(parsed.slo_ttft_ms), _seconds(parsed.slo_itl_ms)),
        json_path=parsed.json,
        allow_failures=parsed.allow_failures,
    )


def _prompts(parsed: argparse.Namespace) -> Path | Synthetic:
    if parsed.prompts is None:
        lengths = parsed.prompt_tokens or parse_lengths("128")
        return Synthetic(lengths, parsed.shared_prefix_tokens or 0)
    for flag, value in (
        ("--prompt-tokens", parsed.prompt_tokens),
        ("--shared-prefix-tokens", parsed.shared_prefix_tokens),
    ):
        if value is not None:
            raise BenchError(f"{flag} is for synthetic prompts: leave it out, or --prompts")
    path: Path = parsed.prompts
    return path


def _api_key(parsed: argparse.Namespace) -> str | None:
    """From the flag, else the file, else the environment. A message never shows the key."""
    key: str | None = parsed.api_key or parsed.environment_key or None
    where = "--api-key" if parsed.api_key else ENV_API_KEY
    if parsed.api_key_file is not None:
        where = f"--api-key-file {parsed.api_key_file}"
        try:
            key = parsed.api_key_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BenchError(f"{where}: can not read it: {error}") from error
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise BenchError(f"{where}: a key is one word of printable ASCII")
    return key


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
