"""The chart as Helm renders it; needs no cluster, only the `helm` that comes with the cluster's."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster import build

CHART = Path(__file__).resolve().parents[2] / "charts/moe-operator"
DEMAND = "MOE_REQUIRE_CLUSTER"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The definitions are long: the loader in C, where there is one, is ten times as fast."""
Manifest = dict[str, Any]


class Refused(Exception):
    """Helm did not render; the text is what it said."""


@dataclass(frozen=True)
class Chart:
    helm: str

    def render(
        self,
        values: Manifest | None = None,
        release: str = "demo",
        namespace: str = "moe-system",
    ) -> list[Manifest]:
        """Objects of a release; raises Refused with Helm's words."""
        text = _template(self.helm, yaml.safe_dump(values or {}), release, namespace)
        return [document for document in yaml.load_all(text, Loader=LOADER) if document]


@functools.cache
def _template(helm: str, values: str, release: str, namespace: str) -> str:
    done = subprocess.run(
        [helm, "template", release, str(CHART), "-n", namespace, "-f", "-"],
        input=values,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        raise Refused(done.stderr)
    return done.stdout


def find_chart() -> Chart:
    """Skips the test when there is no Helm, unless the cluster's programs are demanded."""
    built = build.binaries().bin / "helm"
    helm = str(built) if built.exists() else shutil.which("helm")
    if helm is not None:
        return Chart(helm)
    message = f"no helm: build it with `python -m devcluster build` (looked for {built})"
    if os.environ.get(DEMAND) == "1":
        pytest.fail(message)
    pytest.skip(message)


def of_kind(objects: list[Manifest], kind: str) -> list[Manifest]:
    return [found for found in objects if found["kind"] == kind]


def pod_template(objects: list[Manifest]) -> Manifest:
    """The operator's pod template."""
    (deployment,) = of_kind(objects, "Deployment")
    template: Manifest = deployment["spec"]["template"]
    return template
