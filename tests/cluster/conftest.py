"""The product installed by its chart on the full cluster, once for all tests here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from devcluster.cluster import Cluster
from tests.support import product
from tests.support.cluster_fixtures import fresh_namespace


@pytest.fixture(scope="session")
def installed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    product.install(cluster, tmp_path_factory.mktemp("chart"))
    yield cluster
    product.uninstall(cluster)


@pytest.fixture(scope="module")
def module_namespace(installed: Cluster) -> Iterator[str]:
    with fresh_namespace(installed) as name:
        yield name


@pytest.fixture
def deployment(installed: Cluster, module_namespace: str) -> Callable[[str], product.Deployment]:
    return lambda name: product.Deployment(installed, module_namespace, name)
