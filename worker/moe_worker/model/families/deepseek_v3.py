"""DeepSeek-V3 and R1: sigmoid scores, chosen within the best groups with a bias of their own.

The bias takes part in the choice only; the weights are the unbiased scores, renormalised and
scaled. Other models of the same architecture (Kimi-K2) are described by the same fields.
"""

from __future__ import annotations

from moe_kernels.router import ExpertGroups, RouterSpec
from moe_worker.model.families import deepseek
from moe_worker.model.families.family import Family
from moe_worker.model.fields import Fields
from moe_worker.model.spec import ModelSpec


def describe(config: Fields) -> ModelSpec:
    config.only("scoring_func", "sigmoid")
    config.only("topk_method", "noaux_tc")
    return ModelSpec(
        **deepseek.common_values(
            config, "deepseek_v3", positions=4096, dense_layers=3, shared_experts=1
        ),
        router=RouterSpec(
            num_experts=config.positive("n_routed_experts", 256),
            top_k=config.positive("num_experts_per_tok", 8),
            score="sigmoid",
            bias_for_selection=True,
            groups=ExpertGroups(
                config.positive("n_group", 8), config.positive("topk_group", 4), "top2sum"
            ),
            renorm=config.flag("norm_topk_prob", True),
            renorm_epsilon=1e-20,
            scale=config.number("routed_scaling_factor", 2.5),
        ),
    )


FAMILY = Family(
    "deepseek_v3", "DeepseekV3ForCausalLM", describe, deepseek.tensors, quantisations=("fp8",)
)
