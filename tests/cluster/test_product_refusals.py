"""What cannot be served: said in a condition with a reason, and no pod stays."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from devcluster.build import CHECKOUT
from devcluster.cluster import Cluster
from devcluster.errors import CommandFailed
from tests.support.manifests import moe_deployment
from tests.support.product import Deployment

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture
def refused(installed: Cluster, module_namespace: str) -> Iterator[Deployment]:
    made = Deployment(installed, module_namespace, "refused")
    yield made
    made.kubectl("delete", "moed", made.name, "--ignore-not-found")
    made.wait(lambda: not made.pods(), "its pods to go", 60)


@pytest.fixture
def model_folder(request: pytest.FixtureRequest) -> str:
    """A copy of the tiny model's folder that pods see, with another number of experts in its
    config."""
    folder = CHECKOUT / ".state" / "test-models" / "experts"
    folder.mkdir(parents=True, exist_ok=True)
    tiny = CHECKOUT / "examples" / "tiny-moe"
    config = json.loads((tiny / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": request.param}))
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tiny / name)
    return f"file://{folder}"


@pytest.mark.parametrize("model_folder", [1], indirect=True)
def test_a09_model_without_experts_forms_no_group(refused: Deployment, model_folder: str) -> None:
    refused.apply(model={"uri": model_folder}, parallelism={"expert": 2})
    refused.wait(
        lambda: refused.condition("Accepted") == ("False", "ModelHasNoExperts"), "the refusal"
    )
    refused.wait(lambda: not refused.pods(), "no pod to stay", 60)
    assert not refused.placement()
    refused.kubectl("annotate", "moed", refused.name, "look=again")
    refused.wait(lambda: not refused.pods(), "no pod to come back", 30)


def test_too_few_slots_for_the_models_experts(refused: Deployment) -> None:
    refused.apply(parallelism={"expert": 2}, experts={"slotsPerRank": 2})
    refused.wait(
        lambda: refused.condition("Accepted") == ("False", "InsufficientSlots"), "the refusal"
    )
    refused.wait(lambda: not refused.pods(), "no pod to stay", 60)
    refused.apply(parallelism={"expert": 2}, experts={"slotsPerRank": 6})
    refused.wait(lambda: refused.condition("Accepted")[0] == "True", "the corrected spec")


def test_model_source_of_a_later_version(refused: Deployment) -> None:
    refused.apply(model={"uri": "hf://org/name"})
    refused.wait(
        lambda: refused.condition("Accepted") == ("False", "ModelSourceUnsupported"), "the refusal"
    )
    assert not refused.pods()


def test_manifests_are_refused_with_the_field_and_the_way_out(refused: Deployment) -> None:
    manifest = moe_deployment(
        refused.name,
        {"experts": {"slotsPerRank": 4, "redundantSlotsPerRank": 1}},
        refused.namespace,
    )
    with pytest.raises(CommandFailed, match="slotsPerRank"):
        refused.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    typo = moe_deployment(refused.name, {"replica": 2}, refused.namespace)
    with pytest.raises(CommandFailed, match="replica"):
        refused.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(typo))
