"""Our definitions in a real API server."""

from __future__ import annotations

from pathlib import Path

import pytest

from devcluster.cluster import Cluster
from moe_api import names

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def definitions(api_server: Cluster) -> Cluster:
    """The API server with the CRDs of this repository served."""
    api_server.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"))
    api_server.kubectl(
        "wait", "--for=condition=Established", "--timeout=30s",
        *(f"crd/{plural}.{names.API_GROUP}" for plural in
          (names.DEPLOYMENT_PLURAL, names.PLACEMENT_PLURAL)),
    )  # fmt: skip
    return api_server
