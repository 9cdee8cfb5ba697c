"""The planner's table of numbers: ours beside the greedy method everybody uses, and the goals.

Usage: python bench/placement.py [--only fractions,drift] [--shapes b,c1] [--quick] [--json FILE]

Every number comes from one process and the same loads. Times are CPU time of the fastest of three
runs; gaps are over the bound that no placement beats. A range goes from the best to the worst of
the loads. A goal that no method can reach in some case says so. `--salt N` draws other loads than
those that the goals were set with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.figure import Choice, Figure, Tally

QUICK_LAYERS = 6
QUICK_LOADS = ("zipf1.0", "lognorm1.0")
QUICK_SHAPES = ("a", "b", "c1", "c3", "d")
HEADER = ("row", "shape", "figure", "ours", "published", "goal", "reached")
WIDTHS = (11, 6, 41, 18, 18, 9, 8)


def main() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    options = _options()
    figures = []
    print(_line(HEADER))
    for tally in _measured(options):
        for figure in tally.figures.values():
            figures.append(figure)
            print(_line(_cells(figure)), flush=True)
    promised = [figure.reached for figure in figures if figure.reached is not None]
    print(f"\n{sum(promised)} of {len(promised)} goals reached")
    if options.json:
        options.json.write_text(json.dumps([f.as_json() for f in figures], indent=1) + "\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="rows, separated by commas: " + ", ".join(_rows()))
    parser.add_argument("--shapes", help="shapes, separated by commas, such as b,c1")
    parser.add_argument("--loads", help="loads, separated by commas, such as zipf1.0,hotdomain")
    parser.add_argument("--quick", action="store_true", help="few layers, two loads, no repeats")
    parser.add_argument("--salt", type=int, default=0, help="seed of the loads")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    options = parser.parse_args()
    unknown = set(_listed(options.only, tuple(_rows()))) - set(_rows())
    if unknown:
        parser.error(f"--only {', '.join(sorted(unknown))}: rows are {', '.join(_rows())}")
    return options


def _rows() -> dict[str, Callable[[Choice], Iterator[Tally]]]:
    from bench import change_rows, full_rows, topology_rows, trace_rows

    return {
        "fractions": full_rows.fractions,
        "even": full_rows.even,
        "drift": change_rows.drift_fractions,
        "drift-even": change_rows.drift_even,
        "trace": trace_rows.trace,
        "waves": change_rows.transitions,
        "rank-lost": change_rows.rank_lost,
        "crossing": topology_rows.crossing,
        "nodes": topology_rows.nodes_per_token,
        "speeds": full_rows.speeds,
    }


def _measured(options: argparse.Namespace) -> Iterator[Tally]:
    from bench.figure import Choice

    choice = Choice(salt=options.salt)
    if options.quick:
        choice = Choice(QUICK_SHAPES, QUICK_LOADS, QUICK_LAYERS, 1, options.salt)
    choice = choice.only(
        _listed(options.shapes, choice.shapes), _listed(options.loads, choice.loads)
    )
    for name in _listed(options.only, tuple(_rows())):
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        yield from _rows()[name](choice)


def _listed(text: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    return default if text is None else tuple(text.split(","))


def _cells(figure: Figure) -> tuple[str, ...]:
    reached = {None: "", True: "yes", False: f"no {' '.join(figure.missed)}"}[figure.reached]
    if figure.out_of_reach:
        reached = f"{reached} (none can: {' '.join(figure.out_of_reach)})"
    return (
        figure.row,
        figure.shape,
        figure.name,
        figure.shown(figure.ours),
        figure.shown(figure.published),
        figure.shown_goal(),
        reached,
    )


def _line(cells: tuple[str, ...]) -> str:
    padded = [f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=True)]
    return " ".join(padded).rstrip()


if __name__ == "__main__":
    sys.exit(main())
