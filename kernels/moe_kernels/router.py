"""Which experts a token goes to and with what weights.

Everything here is per row and in a fixed order of additions, so a token's choice does not depend on
what shares its batch. A `RouterSpec` is a plain value, so that a model's description can have one
without torch: nothing of an implementation is imported before `choose_experts` is called.

Logits that are no numbers are not hidden: a token with a NaN among its logits (or +inf, where the
score is a softmax) still gets K different experts, always the same, and weights of NaN, so that the
fault shows in its own output and in no other token's. A NaN ranks before every number.
Neighbours: `gate` makes the logits and calls this in one; the worker's table of slots then says
where the chosen experts live.

Letters: T tokens, E logical experts, K choices a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moe_kernels.implementation import implemented

if TYPE_CHECKING:
    from torch import Tensor


class UnfitRouter(ValueError):
    """No router can be like that; the message names fields as a model's config.json does."""


@dataclass(frozen=True)
class ExpertGroups:
    """Group-limited routing: experts in `num` equal blocks, only the best `keep` may be chosen."""

    num: int
    keep: int
    reduce: Literal["max", "top2sum"] = "max"
    """A group's score: its best expert's, or the sum of its two best."""


@dataclass(frozen=True)
class RouterSpec:
    """How gate logits become choices and weights."""

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid", "softmax_topk"] = "softmax"
    """softmax: over all experts, before the choice; softmax_topk: over the chosen logits."""
    logit_bias: bool = False
    """The gate has a bias, part of the logits."""
    bias_for_selection: bool = False
    """A bias per expert is added to the scores for the choice, never to the weights."""
    groups: ExpertGroups | None = None
    renorm: bool = True
    """Divide the chosen weights by their sum."""
    renorm_epsilon: float = 0.0
    """Added to that sum."""
    scale: float = 1.0
    """Multiplies the weights at the end."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise UnfitRouter(
                f"num_experts_per_tok is {self.top_k}: must be 1 to the {self.num_experts} experts"
            )
        groups = self.groups
        if groups is None:
            return
        if groups.num < 1 or self.num_experts % groups.num:
            raise UnfitRouter(
                f"n_group {groups.num} does not divide the {self.num_experts} experts"
            )
        if not 1 <= groups.keep <= groups.num:
            raise UnfitRouter(f"topk_group {groups.keep}: must be 1 to n_group {groups.num}")
        reachable = groups.keep * self.num_experts // groups.num
        if self.top_k > reachable:
            raise UnfitRouter(
                f"num_experts_per_tok {self.top_k} of the {reachable} experts that topk_group "
                f"{groups.keep} leaves to choose from"
            )


@implemented
def choose_experts(
    logits_TE: Tensor, spec: RouterSpec, selection_bias_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The `spec.top_k` best experts of each token, best first; among equals the lowest id wins.

    Args:
        logits_TE: any float dtype; scores are computed in float32.
        selection_bias_E: float32, added to the scores for the choice only; given exactly when
            `spec.bias_for_selection`.

    Returns (ids int64 [T, K], weights float32 [T, K]). Choices are exact given the scores; the
    exponential in them may differ in its last bits from one implementation to another.

    Raises:
        ValueError: the logits or the bias are not of this router.
    """
    from moe_kernels.reference import router as reference

    check_fit(logits_TE.shape[1], spec, selection_bias_E)
    return reference.choose_experts(logits_TE, spec, selection_bias_E)


def check_fit(num_logits: int, spec: RouterSpec, selection_bias_E: Tensor | None) -> None:
    """Raise ValueError unless the logits and the bias are of this router."""
    if num_logits != spec.num_experts:
        raise ValueError(f"{num_logits} logits a token for {spec.num_experts} experts")
    if (selection_bias_E is not None) != spec.bias_for_selection:
        raise ValueError("a selection bias is given exactly when the router has one")
