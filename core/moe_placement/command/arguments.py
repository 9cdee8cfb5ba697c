"""Flags that several sub-commands share, and what they become: a load, a capacity, figures.

Neighbours: `flags` (their values), `load_files` and `plan_files` (the files they name).

Shapes: R ranks, in plan order.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe_placement.capacity import MAX_RANKS, Capacity, CapacityError, SpeedsR
from moe_placement.command import arrays, flags, load_files, plan_files
from moe_placement.command.choice import Choice
from moe_placement.command.load_files import Load
from moe_placement.command.usage import UsageError
from moe_placement.copy_limits import CopyLimits, CopyLimitsError
from moe_placement.goal import Split
from moe_placement.initial import InsufficientSlots
from moe_placement.placement import Placement
from moe_placement.topology.expert_groups import ExpertGroupsError

BYTES_PER_EXPERT = 44_040_192
"""3 · 7168 · 2048 bytes: an expert of DeepSeek-V3 in FP8."""
MAX_SLOTS = 65536
MIN_SPEED, MAX_SPEED = 0.01, 100.0
"""Of a rank, 1 = normal: further apart, sums of loads lose the slow ones."""


def add_load(parser: argparse.ArgumentParser, required: bool = True) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--load", type=Path, required=required, metavar="FILE",
        help="tokens per layer and expert: .npy, .npz, .json, .jsonl or .yaml",
    )  # fmt: skip
    add_choice(group)


def add_choice(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--corpus", type=flags.names, default=(), metavar="NAME,…",
        help="of a file with several corpora (domains): which of them, or all",
    )  # fmt: skip
    group.add_argument(
        "--windows", type=flags.windows, metavar="A:B",
        help="of a file with several windows: from A up to, not including B",
    )  # fmt: skip
    group.add_argument(
        "--window-tokens", type=flags.whole(1), metavar="N",
        help="tokens of a window, where the file is token routing",
    )  # fmt: skip
    group.add_argument(
        "--experts", type=flags.whole(1, 65536), metavar="N",
        help="experts of the model, where the file is token routing (default: largest id + 1)",
    )  # fmt: skip


def choice(parsed: argparse.Namespace) -> Choice:
    return Choice(parsed.corpus, parsed.windows, parsed.window_tokens, parsed.experts)


def load(parsed: argparse.Namespace) -> Load:
    return load_files.read_load("--load", parsed.load, choice(parsed))


def add_ranks(parser: argparse.ArgumentParser, *, sized: bool, draining: bool = True) -> None:
    """Flags about ranks; `sized` where no plan says how many there are, `draining` where it matters
    that some still serve and give while they leave."""
    group = parser.add_argument_group("ranks")
    group.add_argument(
        "--ranks", type=flags.whole(1, MAX_RANKS), required=sized, metavar="N",
        help="ranks of the group" + ("" if sized else ", where the plan's format does not say it"),
    )  # fmt: skip
    group.add_argument(
        "--slots-per-rank", type=flags.counts, required=sized, metavar="N",
        help="serving slots of a rank in a layer; a list gives each rank its own"
        + ("" if sized else " (default: as wide as the plan)"),
    )  # fmt: skip
    group.add_argument(
        "--domains", type=flags.counts, metavar="N,N,…",
        help="ranks of each topology domain (host, rack), in order: 8,8,8,8",
    )  # fmt: skip
    group.add_argument(
        "--speeds", metavar="FILE",
        help="speed of each rank, 1 = normal: a .npy file, or a list: 1,1,0.7,1",
    )  # fmt: skip
    parser.set_defaults(dead=(), draining=())
    group.add_argument(
        "--dead", type=flags.ranks, metavar="R,…",
        help="ranks that are gone, with their weights: 3,7 or 8-15",
    )  # fmt: skip
    if not draining:
        return
    group.add_argument(
        "--draining", type=flags.ranks, metavar="R,…",
        help="ranks that are leaving, but can still give their weights",
    )  # fmt: skip


def capacity(parsed: argparse.Namespace, num_ranks: int, slots: int | None = None) -> Capacity:
    """What the ranks can take, by the flags of `add_ranks`.

    Args:
        slots: of each rank, where --slots-per-rank is absent.

    Raises:
        UsageError: a list that does not fit the ranks, or no rank left.
    """
    per_rank: tuple[int, ...] = parsed.slots_per_rank or (slots or 0,)
    _bound("--slots-per-rank", per_rank, MAX_SLOTS)
    if len(per_rank) not in (1, num_ranks):
        raise UsageError(
            f"--slots-per-rank: {len(per_rank)} entries for {num_ranks} ranks: give one, or one "
            "for each"
        )
    both = sorted(set(parsed.dead) & set(parsed.draining))
    if both:
        raise UsageError(f"--dead, --draining: rank {both[0]} is named by both: it is one of them")
    try:
        return Capacity.of(
            list(per_rank) * (num_ranks if len(per_rank) == 1 else 1),
            num_ranks,
            speeds=None if parsed.speeds is None else _speeds(parsed.speeds, num_ranks),
            dead=_existing("--dead", parsed.dead, num_ranks),
            draining=_existing("--draining", parsed.draining, num_ranks),
            domains=None if parsed.domains is None else _domains(parsed.domains, num_ranks),
        )
    except CapacityError as error:
        raise UsageError(str(error)) from error


def add_walk(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--bytes-per-expert", type=flags.byte_count, default=BYTES_PER_EXPERT, metavar="N",
        help="weights of one expert in one layer, e.g. 42Mi "
        "(default: %(default)s, DeepSeek-V3 in FP8)",
    )  # fmt: skip
    group.add_argument(
        "--spare-slots", type=flags.whole(0, 64), default=1, metavar="N",
        help="slots of a rank beside the serving ones, for weights on their way "
        "(default: %(default)s)",
    )  # fmt: skip


def add_copies(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("beside balance")
    group.add_argument(
        "--min-copies", type=flags.whole(1, MAX_RANKS), default=1, metavar="N",
        help="copies that every expert has at least (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--max-copies", type=flags.whole(1, MAX_RANKS), metavar="N",
        help="copies that an expert has at most (default: one on each rank)",
    )  # fmt: skip
    return group


def add_spread(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--spread", type=flags.whole(1, 64), default=1, metavar="N",
        help="domains over which an expert's copies are spread, if it has so many "
        "(default: %(default)s)",
    )  # fmt: skip


def copy_limits(parsed: argparse.Namespace) -> CopyLimits:
    try:
        return CopyLimits(parsed.min_copies, parsed.max_copies)
    except CopyLimitsError as error:
        raise UsageError(f"--min-copies, --max-copies: {error}") from error


def check_domains(parsed: argparse.Namespace) -> None:
    """Raise UsageError where something is asked of domains and none are named."""
    if parsed.domains is None and parsed.spread > 1:
        raise UsageError(
            f"--spread: {parsed.spread} domains, but no --domains: say which there are"
        )
    if parsed.domains is None and parsed.near:
        raise UsageError("--near: there are no --domains: say which there are")
    if parsed.near and parsed.split == Split.EVEN:
        raise UsageError("--near: even copies can not keep tokens near: leave out --split even")


def unplannable(error: ValueError) -> UsageError:
    """What the planner refuses, with the flags that it is about."""
    if isinstance(error, InsufficientSlots):
        return UsageError(f"--ranks, --slots-per-rank: {error}")
    if isinstance(error, CopyLimitsError):
        return UsageError(f"--min-copies: {error}")
    if isinstance(error, ExpertGroupsError):
        return UsageError(f"--groups: {error}")
    return UsageError(str(error))


def plan_in_force(parsed: argparse.Namespace, load: Load) -> Placement:
    """The plan of --current."""
    found = plan_files.read_plan("--current", parsed.current, parsed.ranks)
    plan_files.check_experts("--current", parsed.current, found, load.experts_L)
    return found.placement


def add_json(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON, for programs"
    )


def _speeds(text: str, num_ranks: int) -> SpeedsR:
    if Path(text).suffix == ".npy":
        found = np.asarray(arrays.read_npy("--speeds", Path(text)), dtype=np.float64)
    else:
        try:
            found = np.array([float(part) for part in text.split(",")], dtype=np.float64)
        except ValueError as error:
            raise UsageError(
                f"--speeds: {text!r} is neither a .npy file nor a list like 1,1,0.7,1"
            ) from error
    if found.shape == (num_ranks,) and not (MIN_SPEED <= found.min() <= found.max() <= MAX_SPEED):
        rank = int(np.argmin((found >= MIN_SPEED) & (found <= MAX_SPEED)))
        raise UsageError(f"--speeds: rank {rank} has speed {found[rank]:g}: must be "
                         f"{MIN_SPEED:g} to {MAX_SPEED:g}, 1 = normal")  # fmt: skip
    if found.shape != (num_ranks,):
        raise UsageError(f"--speeds: {text} has shape {found.shape}: must be one for each of "
                         f"{num_ranks} ranks")  # fmt: skip
    return found


def _domains(sizes: Sequence[int], num_ranks: int) -> list[int]:
    if sum(sizes) != num_ranks:
        raise UsageError(
            f"--domains: {','.join(map(str, sizes))} are {sum(sizes)} ranks, there are {num_ranks}"
        )
    return [domain for domain, size in enumerate(sizes) for _ in range(size)]


def _existing(flag: str, ranks: Sequence[int], num_ranks: int) -> Sequence[int]:
    wrong = [rank for rank in ranks if rank >= num_ranks]
    if wrong:
        raise UsageError(f"{flag}: rank {wrong[0]} does not exist: ranks are 0 to {num_ranks - 1}")
    return ranks


def _bound(flag: str, values: Sequence[int], most: int) -> None:
    if max(values) > most:
        raise UsageError(f"{flag}: {max(values)} must be {most} or less")
