"""LoadReports in a file: counters of worker processes, cumulative since each began.

As one load, the newest report of each process counts. As a trace, the k-th interval of all
processes is window k: what each counted between its k-th report and the next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_api.document import DocumentError
from moe_api.load import LoadReport
from moe_placement.command.usage import UsageError

Rows = list[list[float]]


def find(flag: str, path: Path, document: Any) -> list[LoadReport] | None:
    """The reports that a document consists of; None when it is something else.

    Raises:
        UsageError: a report that can not be read, or reports of different models.
    """
    found = document.get("reports", [document]) if isinstance(document, dict) else document
    if not isinstance(found, list) or not found:
        return None
    if not all(isinstance(entry, dict) and "routed" in entry for entry in found):
        return None
    reports = []
    for number, entry in enumerate(found):
        try:
            reports.append(LoadReport.from_json(json.dumps(entry)))
        except DocumentError as error:
            raise UsageError(f"{flag}: {path}: report {number}: {error}") from error
        if _shape(reports[-1]) != _shape(reports[0]):
            raise UsageError(
                f"{flag}: {path}: report {number} (member {reports[-1].member}) has other layers "
                "or experts than the first: give reports of one group"
            )
    return reports


def total(reports: Sequence[LoadReport]) -> Rows:
    """Tokens per layer and expert that all processes counted since they began."""
    newest = {(report.member, report.incarnation): report for report in reports}
    return _sum([report.routed for report in newest.values()])


def intervals(reports: Sequence[LoadReport]) -> list[Rows]:
    """Tokens per layer and expert between the k-th reports of the members and their next ones;
    as long as the shortest member's series."""
    series: dict[int, list[Rows]] = {}
    last: dict[int, LoadReport] = {}
    for report in reports:
        before = last.get(report.member)
        last[report.member] = report
        steps = series.setdefault(report.member, [])
        if before is None:
            continue
        restarted = before.incarnation != report.incarnation
        steps.append(_sum([report.routed]) if restarted else _less(report.routed, before.routed))
    return [_sum(step) for step in zip(*series.values(), strict=False)]


def _shape(report: LoadReport) -> list[int]:
    return [len(row) for row in report.routed]


def _sum(tables: Sequence[Sequence[Sequence[float]]]) -> Rows:
    return [
        [float(sum(column)) for column in zip(*rows, strict=True)]
        for rows in zip(*tables, strict=True)
    ]


def _less(new: Sequence[Sequence[float]], old: Sequence[Sequence[float]]) -> Rows:
    return [
        [float(after - before) for after, before in zip(*rows, strict=True)]
        for rows in zip(new, old, strict=True)
    ]
