"""The command line: `python3 -m devcluster up`, run from the top of the checkout."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from devcluster import lifecycle
from devcluster.build import build
from devcluster.cluster import Cluster
from devcluster.errors import ClusterError
from devcluster.instance import DEFAULT_NAME, existing, state_root
from devcluster.lock import locked
from devcluster.progress import Say, printer
from devcluster.spec import ClusterSpec, control_plane_only, parse_labels, with_nodes

SESSION_SECONDS = 1800


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    options = _parser().parse_args(arguments)
    say = printer()
    try:
        return int(options.run(options, say))
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Being told to end is handled as Ctrl-C is: what was begun is cleaned up."""
    raise KeyboardInterrupt


def _build(_options: argparse.Namespace, say: Say) -> int:
    built = build(say)
    print(built.bin)
    return 0


def _up(options: argparse.Namespace, say: Say) -> int:
    cluster = lifecycle.up(options.name, _spec(options), say)
    print(f"export KUBECONFIG={shlex.quote(str(cluster.kubeconfig))}")
    return 0


def _down(options: argparse.Namespace, say: Say) -> int:
    names = existing(state_root()) if options.all else [options.name]
    for name in names:
        lifecycle.down(name, say)
    return 0


def _hold(options: argparse.Namespace, say: Say) -> int:
    """For a program that wants a cluster for as long as it lives, and no longer."""
    session = state_root() / f"{options.name}.session.lock"
    what = f"another program that uses cluster {options.name!r}"
    with locked(session, SESSION_SECONDS, say, what):
        was_running = options.name in existing(state_root())
        lifecycle.up(options.name, _spec(options), say)
        try:
            print("ready", flush=True)
            sys.stdin.read()
        finally:
            if not was_running:
                lifecycle.down(options.name, say)
            session.unlink()
    return 0


def _status(options: argparse.Namespace, _say: Say) -> int:
    cluster = Cluster.load(options.name)
    problems = cluster.problems()
    print(f"cluster {cluster.name}: {'; '.join(problems) or 'healthy'}")
    print(f"  API server  {cluster.url}")
    print(f"  kubeconfig  {cluster.kubeconfig}")
    print(f"  programs    {cluster.binaries.bin}")
    print(f"  logs        {cluster.instance.state / 'logs'}")
    for node in cluster.nodes:
        print(f"  {node.name:<11} {node.address}")
    return 1 if problems else 0


def _env(options: argparse.Namespace, _say: Say) -> int:
    cluster = Cluster.load(options.name)
    print(f"export KUBECONFIG={shlex.quote(str(cluster.kubeconfig))}")
    print(f"export KUBECACHEDIR={shlex.quote(str(cluster.discovery_cache))}")
    print(f"export PATH={shlex.quote(str(cluster.binaries.bin))}:$PATH")
    return 0


def _program(options: argparse.Namespace, _say: Say) -> int:
    cluster = Cluster.load(options.name)
    program = cluster.binaries.bin / options.command
    os.execve(
        program, [options.command, *_without_dashes(options.arguments)], cluster.environment()
    )


def _without_dashes(arguments: Sequence[str]) -> Sequence[str]:
    """A leading `--` only told our parser that the rest is not for it."""
    return arguments[1:] if arguments[:1] == ["--"] else arguments


def _spec(options: argparse.Namespace) -> ClusterSpec:
    if options.control_plane_only:
        return control_plane_only()
    return with_nodes(options.nodes, gpus=options.gpus, labels=parse_labels(options.label))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m devcluster",
        description="A real Kubernetes of several nodes on this machine, without Docker.",
    )
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--name", default=DEFAULT_NAME, help="which cluster (default: %(default)s)")
    wanted = argparse.ArgumentParser(add_help=False, parents=[named])
    wanted.add_argument("--nodes", type=int, default=3, help="how many (default: %(default)s)")
    wanted.add_argument("--gpus", type=int, default=0, help="GPUs that each node pretends to have")
    wanted.add_argument(
        "--label", action="append", default=[], metavar="NODE:KEY=VALUE", help="may be repeated"
    )
    wanted.add_argument(
        "--control-plane-only", action="store_true", help="no nodes, no pods, no need for root"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: object, text: str, *parents: argparse.ArgumentParser) -> None:
        commands.add_parser(name, help=text, description=text, parents=parents).set_defaults(
            run=run
        )

    add("build", _build, "build the cluster's binary; prints the folder of kubectl and helm")
    add("up", _up, "start a cluster, or do nothing when it runs", wanted)
    add("down", _down, "remove a cluster without a trace", named)
    commands.choices["down"].add_argument("--all", action="store_true", help="all clusters")
    add("hold", _hold, "up, until standard input is closed; then down", wanted)
    add("status", _status, "tell whether a cluster is healthy, and where its files are", named)
    add("env", _env, "print shell commands that make kubectl and helm use a cluster", named)
    for program in ("kubectl", "helm"):
        add(program, _program, f"run {program} on a cluster (put -- before its options)", named)
        commands.choices[program].add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
