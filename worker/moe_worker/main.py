"""The command `moe-worker`: reads flags, files and environment once, starts what was asked for.

Nothing below this module reads the environment. Help and a wrong flag are answered at once: only
the flags of the command that was asked for are built, and what computes or serves is imported when
it begins.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import logging
import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moe_api import logs, names

if TYPE_CHECKING:
    from moe_api.worker import WorkerConfig
    from moe_worker.serve import ServeSettings

logger = logging.getLogger(__name__)

LOG_LEVELS = ("debug", "info", "warning", "error")

DESCRIPTION = """\
Serve a Mixture-of-Experts model with its experts spread over a group of workers.

  moe-worker local   a whole group on this machine, no Kubernetes: start here
  moe-worker serve   one member of a group; the operator runs this in each pod
  moe-worker bench   measure a server of OpenAI's API, this one or another
  moe-worker warm-up compile the kernels ahead, into the cache that later starts load from
"""
SERVE_DESCRIPTION = f"""\
Run one worker. It reads its configuration and its model, then waits for a plan on the control port;
once its group has formed it answers OpenAI's API on the public port.

  public   :{names.HTTP_PORT}  /v1/models /v1/completions /v1/chat/completions
                  /v1/requests/ID (DELETE cancels) /openapi.json /healthz /readyz /metrics
  control  :{names.CONTROL_PORT}  /control/v1/… with "Authorization: Bearer TOKEN"; never expose it

SIGTERM drains: nothing new is let in, requests finish (at most drainSeconds), then it exits with 0.
A second signal ends all requests at once and exits with 1.
"""
SERVE_EXAMPLE = """\
example, a group of one on this machine:
  echo '{"schema":1,"model":{"path":"examples/tiny-moe","servedName":"tiny-moe"}}' > worker.json
  echo secret > token
  moe-worker serve --config worker.json --control-token-file token --host 127.0.0.2 --member 0
then PUT a plan that names member 0 (docs/architecture.md), or use `moe-worker local`.
"""


class UsageError(ValueError):
    """A flag, file or variable that can not be used as it is; shown as one line."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; exits the process."""
    given = sys.argv[1:] if arguments is None else arguments
    command = next((word for word in given if not word.startswith("-")), "")
    parser = build_parser(os.environ, command)
    parsed = parser.parse_args(given)
    try:
        sys.exit(parsed.run(parsed))
    except UsageError as error:
        parser.exit(2, f"moe-worker: {error}\n")


def build_parser(
    environment: Mapping[str, str], command: str | None = None
) -> argparse.ArgumentParser:
    """All commands, with the flags of `command` (None: of all of them).

    Defaults come from `environment` where the operator sets them.
    """
    parser = argparse.ArgumentParser(
        prog="moe-worker",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, meaning, add_flags in (
        ("serve", "run one member of a group", _add_serve),
        ("local", "run a whole group on this machine", _add_local),
        ("bench", "measure a server of OpenAI's API", _add_bench),
        ("warm-up", "compile the kernels ahead", _add_warm_up),
    ):
        added = commands.add_parser(
            name, help=meaning, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if command in (name, None):
            add_flags(added, environment)
    return parser


def _add_serve(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    parser.description, parser.epilog = SERVE_DESCRIPTION, SERVE_EXAMPLE
    parser.set_defaults(run=_serve)
    files = parser.add_argument_group("files")
    files.add_argument(
        "--config",
        type=Path,
        default=Path(names.CONFIG_DIR, names.CONFIG_FILE),
        metavar="FILE",
        help="WorkerConfig as JSON: model, KV cache, scheduler, limits (default: %(default)s)",
    )
    files.add_argument(
        "--control-token-file",
        type=Path,
        default=Path(names.CONTROL_TOKEN_DIR, names.CONTROL_TOKEN_FILE),
        metavar="FILE",
        help="bearer token of the control API, the same for all members (default: %(default)s)",
    )
    network = parser.add_argument_group("network")
    network.add_argument(
        "--address",
        default=environment.get(names.ENV_POD_IP),
        help=f"this worker's address in plans (default: {names.ENV_POD_IP}); tells IPv4 from IPv6",
    )
    network.add_argument(
        "--host", help="address to listen on (default: all addresses of --address's family)"
    )
    network.add_argument(
        "--http-port", type=_port, default=names.HTTP_PORT, help="default: %(default)s"
    )
    network.add_argument(
        "--control-port",
        type=_port,
        default=names.CONTROL_PORT,
        help="default: %(default)s; members look for each other there",
    )
    identity = parser.add_argument_group("identity, as plans name it")
    for flag, variable, kind, fallback, meaning in (
        ("--namespace", names.ENV_NAMESPACE, str, "default", "Kubernetes namespace"),
        ("--deployment", names.ENV_DEPLOYMENT, str, "local", "name of the MoEDeployment"),
        ("--group", names.ENV_GROUP, int, "0", "EP group, from 0"),
        ("--member", names.ENV_MEMBER, int, "0", "member id in the group, from 0"),
        ("--incarnation", names.ENV_POD_UID, str, uuid.uuid4().hex, "id of this very process"),
    ):
        shown = "random" if flag == "--incarnation" else repr(fallback)
        identity.add_argument(
            flag,
            type=kind,
            default=environment.get(variable) or fallback,
            help=f"{meaning} (default: {variable}, else {shown})",
        )
    parser.add_argument(
        "--threads",
        type=_positive,
        default=1,
        help="threads of one tensor operation (default: %(default)s)",
    )
    from moe_kernels.implementation import NAMES, VARIABLE

    parser.add_argument(
        "--kernels",
        choices=("auto", *NAMES),
        default=environment.get(VARIABLE) or None,
        help="whose operations compute: the fastest on the device (auto), compiled for this "
        f"processor (cpu), plain torch (reference) (default: {VARIABLE}, else as --config says)",
    )
    parser.add_argument(
        "--log-level", choices=LOG_LEVELS, default="info", help="default: %(default)s"
    )


def _add_local(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    from moe_worker import local

    parser.description = local.__doc__
    local.add_arguments(parser)
    parser.set_defaults(run=local.run)


def _add_bench(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    from moe_worker import bench

    parser.description = bench.__doc__
    bench.add_arguments(parser, environment)
    parser.set_defaults(run=bench.run)


def _add_warm_up(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    from moe_worker import warm_up

    parser.description = warm_up.__doc__
    warm_up.add_arguments(parser)
    parser.set_defaults(run=warm_up.run)


def _serve(parsed: argparse.Namespace) -> int:
    settings = serve_settings(parsed)
    from moe_worker.api.api_key import ApiKeysUnusable
    from moe_worker.listener import AddressInUse
    from moe_worker.serve import serve

    logs.configure(parsed.log_level, settings.identity.log_context())
    # Until it serves there is nothing to drain. The first process of a container ignores signals
    # that it has no handler for.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    logger.info("incarnation %s starts", settings.identity.incarnation)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one prompt at a time, one thread
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what ranks do about a loss we log
    try:
        return serve(settings)
    except (AddressInUse, ApiKeysUnusable) as error:
        raise UsageError(str(error)) from error


def serve_settings(parsed: argparse.Namespace) -> ServeSettings:
    """Read the files that the flags of `serve` name.

    Raises:
        UsageError: naming the flag or file, and the way out.
    """
    config, token = _read_config(parsed.config), _read_token(parsed.control_token_file)
    config = _with_kernels(config, parsed.kernels)
    host = parsed.host or _any_address(parsed.address)
    from moe_worker.serve import Identity, ServeSettings

    return ServeSettings(
        config=config,
        token=token,
        identity=Identity(
            namespace=parsed.namespace,
            deployment=parsed.deployment,
            group=parsed.group,
            member=parsed.member,
            incarnation=parsed.incarnation,
        ),
        host=host,
        http_port=parsed.http_port,
        control_port=parsed.control_port,
        threads=parsed.threads,
    )


def _read_config(path: Path) -> WorkerConfig:
    from moe_api.document import DocumentError
    from moe_api.worker import WorkerConfig

    try:
        return WorkerConfig.from_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"--config: can not read {path}: {error.strerror}") from error
    except DocumentError as error:
        raise UsageError(f"--config: {path}: {error}") from error


def _with_kernels(config: WorkerConfig, kernels: str | None) -> WorkerConfig:
    from moe_api.document import DocumentError

    if kernels is None:
        return config
    try:
        return type(config).from_json(json.dumps({**config.to_wire(), "kernels": kernels}))
    except DocumentError as error:
        raise UsageError(f"--kernels: {error}") from error


def _read_token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--control-token-file: can not read {path}: {error}") from error
    if not token:
        raise UsageError(f"--control-token-file: {path} is empty; put a long random text into it")
    return token


def _any_address(address: str | None) -> str:
    """All interfaces, in the family of `address`."""
    if not address:
        raise UsageError(
            f"--host is missing: give an address to listen on, or set {names.ENV_POD_IP}"
        )
    try:
        return "::" if ipaddress.ip_address(address).version == 6 else "0.0.0.0"
    except ValueError as error:
        raise UsageError(f"--address: {address!r} is no IP address") from error


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is no port (0 to 65535)")
    return port


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


if __name__ == "__main__":
    main()
