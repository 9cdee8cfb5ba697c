"""Clusters for tests: an API server without nodes, and a full cluster with three nodes.

Both are started by a process of their own (`python -m devcluster hold`) that takes them down when
its standard input ends, so an interrupted or killed test run leaves nothing behind either.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from devcluster.build import CHECKOUT
from devcluster.cluster import Cluster
from devcluster.waiting import wait_until

CLUSTER_NAME = os.environ.get("MOE_TEST_CLUSTER", "moetest")
DEMAND = "MOE_REQUIRE_CLUSTER"
"""When this variable is 1, a cluster that cannot be had is a failure and no reason to skip."""
DOWN_SECONDS = 120


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """API server, etcd and controllers, without nodes: pods are never scheduled. No root needed."""
    name = f"t{secrets.token_hex(4)}"
    log = tmp_path_factory.mktemp("api-server") / "start.log"
    with _held(name, ["--control-plane-only"], log) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes that run pods. Needs root on Linux. One test run at a time uses it."""
    log = tmp_path_factory.mktemp("cluster") / "start.log"
    with _held(CLUSTER_NAME, ["--nodes", "3"], log) as cluster:
        yield cluster


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """A fresh namespace, in the full cluster when the test asks for that, else in `api_server`."""
    full = "cluster" in request.fixturenames
    with fresh_namespace(request.getfixturevalue("cluster" if full else "api_server")) as name:
        yield name


@contextmanager
def fresh_namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace for the time of the context, ready for pods."""
    name = f"test-{secrets.token_hex(4)}"
    path = f"/api/v1/namespaces/{name}"
    cluster.api.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    # Without its service account no pod can be made in it.
    wait_until(
        lambda: cluster.api.exists(f"{path}/serviceaccounts/default"), 30, f"namespace {name}"
    )
    try:
        yield name
    finally:
        now = "gracePeriodSeconds=0&propagationPolicy=Background"
        cluster.api.request("DELETE", f"{path}/pods?{now}")
        cluster.api.request("DELETE", path)
    if cluster.nodes:  # the next test wants the machine's processors for itself
        wait_until(
            lambda: not cluster.api.get(f"{path}/pods")["items"], 60, f"the end of {name}'s pods"
        )


@contextmanager
def _held(name: str, options: list[str], log: Path) -> Iterator[Cluster]:
    """Run `hold` for the time of the context."""
    command = [sys.executable, "-m", "devcluster", "hold", "--name", name, *options]
    with (
        log.open("wb") as progress,
        subprocess.Popen(
            command,
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=progress,
            start_new_session=True,  # Ctrl-C is for us; the holder sees its input end
        ) as holder,
    ):
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            if holder.stdout.readline() != b"ready\n":
                _refuse(log.read_text(errors="replace"))
            yield Cluster.load(name)
        finally:
            holder.stdin.close()
            holder.wait(DOWN_SECONDS)


def _refuse(said: str) -> None:
    message = f"no test cluster:\n{said[-3000:]}"
    if os.environ.get(DEMAND) == "1":
        pytest.fail(message)
    pytest.skip(message)
