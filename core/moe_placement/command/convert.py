"""Read a plan in one format and write it in another.

  npz                  .npz: slots and fractions, [layers, ranks, slots]
  group-plan           .json or .yaml: what the operator stores and workers obey
  trtllm               .yaml: initial_global_assignments of TensorRT-LLM
  physical-to-logical  .json: physical_to_logical_map of SGLang, vLLM's table

Read are also .npy (slots alone), and ExpertPlacement as kubectl prints it. Tables of other engines
do not say how many ranks they are for: give --ranks. They have no fractions: copies share evenly.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moe_api.plan import GroupPlan, PreviousPlacement
from moe_placement.command import flags, outputs, plan_files, plan_formats
from moe_placement.command.plan_formats import Format
from moe_placement.command.usage import UsageError

HELP = "from one format of plans to another"
EXAMPLES = """\
examples:
  moe-plan convert P.npz plan.json
  moe-plan convert P.npz plan.json --like in-force.json    (its members, its next epoch)
  moe-plan convert P.npz balancer.yaml --to trtllm --first-layer 3
  moe-plan convert map.json theirs.npz --ranks 32
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN", help="the plan to read")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="the file to write")
    parser.add_argument(
        "--to", choices=[format.value for format in Format], metavar="FORMAT",
        help=f"{', '.join(Format)} (default: by OUTPUT's suffix, npz or group-plan)",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=flags.whole(1, 4096), metavar="N",
        help="ranks of the plan, where its format does not say so",
    )  # fmt: skip
    parser.add_argument(
        "--like", type=Path, metavar="FILE",
        help="plan in force whose members and numbers a group-plan takes over",
    )  # fmt: skip
    parser.add_argument(
        "--first-layer", type=flags.whole(0, 65535), metavar="N",
        help="number of the first MoE layer in the model (default: 0, or as read)",
    )  # fmt: skip


def run(parsed: argparse.Namespace) -> int:
    to = Format(parsed.to) if parsed.to else plan_formats.by_suffix(parsed.output)
    outputs.check("OUTPUT", parsed.output, plan_formats.SUFFIXES[to])
    plan = plan_files.read_plan("PLAN", parsed.plan, parsed.ranks, keep_twins=True)
    around = plan.document if parsed.like is None else _next_epoch(parsed.like)
    layers = None
    if parsed.first_layer is not None:
        layers = range(parsed.first_layer, parsed.first_layer + plan.num_layers)
    content = plan_formats.encode(plan.placement, parsed.output, to, around, layers)
    outputs.write("OUTPUT", parsed.output, content)
    if to not in plan_formats.KEEPS_FRACTIONS:
        print(f"{to} has no fractions: the engine splits evenly", file=sys.stderr)
    return 0


def _next_epoch(path: Path) -> GroupPlan:
    """The plan after the one in force in `path`, with its members."""
    like = plan_files.read_plan("--like", path).document
    if like is None:
        raise UsageError(f"--like: {path} names no members: give a GroupPlan or ExpertPlacement")
    before = PreviousPlacement(epoch=like.epoch, layers=like.layers)
    return like.model_copy(update={"epoch": like.epoch + 1, "previous": before})
