"""DeepSeek-V2: softmax over all experts, greedy or within the groups of the best experts.

The weights of the chosen are scaled and never renormalised: `norm_topk_prob` of its configs says
so, and `transformers` does not read it.
"""

from __future__ import annotations

from moe_kernels.router import ExpertGroups, RouterSpec
from moe_worker.model.families import deepseek
from moe_worker.model.families.family import Family
from moe_worker.model.fields import Fields
from moe_worker.model.spec import ModelSpec

_METHODS = ("greedy", "group_limited_greedy")


def describe(config: Fields) -> ModelSpec:
    config.only("scoring_func", "softmax")
    return ModelSpec(
        **deepseek.common_values(
            config, "deepseek_v2", positions=2048, dense_layers=0, shared_experts=2
        ),
        router=RouterSpec(
            num_experts=config.positive("n_routed_experts", 64),
            top_k=config.positive("num_experts_per_tok"),
            groups=_groups(config),
            renorm=False,
            scale=config.number("routed_scaling_factor", 1.0),
        ),
    )


def _groups(config: Fields) -> ExpertGroups | None:
    method = config.get("topk_method", _METHODS[0])
    if method not in _METHODS:
        raise config.wrong("topk_method", f"one of {', '.join(_METHODS)}", method)
    if method == _METHODS[0]:
        return None
    return ExpertGroups(config.positive("n_group"), config.positive("topk_group"))


FAMILY = Family(
    "deepseek_v2", "DeepseekV2ForCausalLM", describe, deepseek.tensors, quantisations=("fp8",)
)
