"""A world for reconcile tests: CRDs in the API server, a namespace, a fleet of fake workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from devcluster.build import CHECKOUT
from devcluster.cluster import Cluster as ApiServerInstance
from tests.support.fake_workers import Fleet
from tests.support.reconcile_world import World


@pytest.fixture(scope="session")
def custom_resources(api_server: ApiServerInstance) -> ApiServerInstance:
    """The API server with our kinds in it."""
    api_server.kubectl("apply", "--server-side", "-f", str(CHECKOUT / "crds"))
    api_server.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    return api_server


@pytest.fixture
def world(custom_resources: ApiServerInstance, namespace: str) -> Iterator[World]:
    with Fleet() as fleet:
        made = World(custom_resources, namespace, fleet)
        yield made
        made.close()
