"""`make demo`: from an empty machine to a rebalanced, killed and healed expert-parallel group."""

from __future__ import annotations

import argparse
import sys
import time

from rich.console import Console
from rich.table import Table

from examples.demo import install, report, scenes
from examples.demo.kube import DemoError
from examples.demo.stage import DEPLOYMENT, Stage

READY_SECONDS = 600


def main() -> int:
    options = _parser().parse_args()
    console = Console(soft_wrap=True)
    try:
        kube = install.own_cluster() if options.cluster == "own" else install.current_cluster()
        stage = Stage(kube, console)
        play(stage, options.cluster)
    except DemoError as error:
        console.print(f"[red]demo failed:[/red] {error}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; the cluster stays up: `make demo` again, or `make demo-down`")
        return 130
    return _close(stage, options.cluster)


def play(stage: Stage, cluster: str) -> None:
    with stage.step("install the chart with Helm"):
        install.chart(stage, cluster)
    with stage.step("apply examples/tiny-moe.yaml"):
        install.deployment(stage)
    with stage.step("wait until Ready"):
        stage.kube.wait(
            f"MoEDeployment {DEPLOYMENT} to be Ready", stage.is_ready, READY_SECONDS,
            stage.why_not_ready,
        )  # fmt: skip
    stage.console.print(stage.kube.kubectl("get", "moed,xp"), markup=False)
    with stage.step("stream a chat answer through kubectl port-forward"):
        scenes.chat(stage)
    with stage.step("rebalance under code traffic"):
        scenes.rebalance(stage)
    with stage.step("kill a worker under traffic"):
        scenes.lose_a_worker(stage)
    stage.measured.seconds_total = time.monotonic() - stage.started


def _close(stage: Stage, cluster: str) -> int:
    """Table, verdict, ways to look around, and last the line for programs."""
    table = Table("measured", "figure", title="moe-operator demo")
    for what, figure in report.rows(stage.measured):
        table.add_row(what, figure)
    stage.console.print(table)
    broken = report.broken_promises(stage.measured)
    for sentence in broken:
        stage.console.print(f"[red]not as promised:[/red] {sentence}", highlight=False)
    stage.console.print(install.look_around(cluster), markup=False, highlight=False)
    print(report.json_line(stage.measured), flush=True)
    return 1 if broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make demo",
        description="Install the operator, serve the tiny MoE model on three workers, rebalance it "
        "under traffic and kill a worker. Exit code 0 only when every promise held.",
    )
    parser.add_argument(
        "--cluster", choices=("own", "current"), default="own",
        help="own: a 3-node Kubernetes on this machine (root, Linux); "
        "current: the cluster of your kubeconfig, with the images of `make images`",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
