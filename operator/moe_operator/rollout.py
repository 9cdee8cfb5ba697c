"""What is to become of each group: kept, rolled to a new template, refused, removed.

Pure. Groups of an old template are rolled one at a time, lowest first, so that the others serve; a
group that does not serve anyway is rolled at once, which is how a broken roll-out is repaired.
Neighbours: `reconcile` asks, `groups` carries an intent out.
"""

from __future__ import annotations

from collections.abc import Mapping

from moe_operator.acceptance import Acceptance
from moe_operator.rules import Intent


def intents(
    replicas: int,
    existing: Mapping[int, bool],
    outdated: Mapping[int, bool],
    acceptance: Acceptance,
) -> dict[int, Intent]:
    """The intent for each wanted or existing group.

    Args:
        existing: per existing group whether every wanted rank serves.
        outdated: per existing group whether it has pods of another template.
    """
    chosen = {index: Intent.REMOVE for index in existing if index >= replicas}
    wanted = range(replicas)
    if not acceptance.accepted:
        refused = Intent.REFUSE if acceptance.blames_model else Intent.WAIT
        return dict(sorted((chosen | {index: refused for index in wanted}).items()))
    busy = any(not outdated.get(i, False) and not existing.get(i, False) for i in wanted)
    for index in wanted:
        if not outdated.get(index, False):
            chosen[index] = Intent.KEEP
        elif not existing[index]:
            chosen[index] = Intent.ROLL
        else:
            chosen[index] = Intent.WAIT if busy else Intent.ROLL
            busy = True
    return dict(sorted(chosen.items()))
