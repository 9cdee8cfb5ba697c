"""When ranks send to near copies first: saved crossings against what it costs in balance."""

from __future__ import annotations

import numpy as np
import pytest

from moe_api.load import LoadReport
from moe_operator.nearby import dispatch, preferred, source_units
from moe_operator.origins import Origins
from moe_placement.placement import Placement
from moe_placement.topology.borders import domains_at, near

HOSTS = [["z", "a"], ["z", "a"], ["z", "b"], ["z", "b"]]
ON_BOTH = Placement.even(np.asarray([[[0, 1], [2, 3], [0, 1], [2, 3]]], dtype=np.int32))
"""Each of four experts once on each host."""
FOREIGN = Placement.even(np.asarray([[[0, -1], [1, -1], [2, -1], [3, -1]]], dtype=np.int32))
EVEN = np.full((4, 1, 4), 1000.0)
BUSY_HOST = EVEN * np.asarray([3, 3, 1, 1]).reshape(4, 1, 1)


def crossing(placement, sources, routed, hosts=HOSTS):
    return dispatch(placement, sources, routed, near(hosts), near(hosts)).crossing


def test_near_copies_first_keep_everything_at_home():
    assert crossing(ON_BOTH, None, EVEN) == pytest.approx(0.5)
    sources = preferred(ON_BOTH, None, EVEN, HOSTS)
    assert sources == source_units(EVEN)
    assert crossing(ON_BOTH, sources, EVEN) == pytest.approx(0.0, abs=1e-3)
    loads = dispatch(ON_BOTH, sources, EVEN, near(HOSTS), near(HOSTS)).loads_LR
    assert loads[0].tolist() == pytest.approx([4000] * 4, rel=1e-3)


def test_busy_hosts_send_what_is_beyond_the_fractions_abroad():
    sources = preferred(ON_BOTH, None, BUSY_HOST, HOSTS)
    assert sources is not None
    used = dispatch(ON_BOTH, sources, BUSY_HOST, near(HOSTS), near(HOSTS))
    assert used.crossing == pytest.approx(0.25, abs=1e-3)
    assert used.loads_LR[0].tolist() == pytest.approx([8000] * 4, rel=1e-3)


def test_requests_that_come_from_elsewhere_now_end_it():
    sources = source_units(EVEN)
    assert preferred(ON_BOTH, sources, EVEN, HOSTS) == sources
    slightly = EVEN * np.asarray([1.04, 1.04, 1, 1]).reshape(4, 1, 1)
    assert preferred(ON_BOTH, sources, slightly, HOSTS) == sources, "next to nothing is lost"
    moved = preferred(ON_BOTH, sources, BUSY_HOST, HOSTS)
    assert moved == source_units(BUSY_HOST), "other sources"
    # Each host's requests want other experts: no sources of the hosts as wholes suit that.
    split = EVEN * np.asarray([[1, 1, 0.2, 0.2]] * 2 + [[0.2, 0.2, 1, 1]] * 2).reshape(4, 1, 4)
    uneven = Placement(ON_BOTH.slots_LRS, ON_BOTH.fractions_LRS)
    assert preferred(uneven, sources, split, HOSTS) is None


def test_it_is_not_worth_a_switch_where_nothing_is_saved():
    assert preferred(FOREIGN, None, EVEN, HOSTS) is None


def test_without_a_border_there_is_no_near():
    assert preferred(ON_BOTH, None, EVEN, [["z", h] for h in "abcd"]) is None
    assert preferred(ON_BOTH, source_units(EVEN), EVEN, [["z", h] for h in "abcd"]) is None


@pytest.mark.parametrize("known", [None, source_units(EVEN)])
def test_too_little_is_known_to_change_anything(known):
    assert preferred(ON_BOTH, known, None, HOSTS) == known
    assert preferred(ON_BOTH, known, EVEN / 1000, HOSTS) == known


def test_what_crosses_is_told_for_the_narrowest_level_too():
    zones = [["y", "a"], ["y", "b"], ["z", "c"], ["z", "d"]]
    near_R, hosts_R = near(zones), domains_at(zones, 1)
    sources = preferred(ON_BOTH, None, EVEN, zones)
    assert dispatch(ON_BOTH, sources, EVEN, near_R, near_R).crossing == pytest.approx(0, abs=1e-3)
    assert dispatch(ON_BOTH, sources, EVEN, near_R, hosts_R).crossing == pytest.approx(0.5)
    assert dispatch(ON_BOTH, None, EVEN, near_R, hosts_R).crossing == pytest.approx(0.75)


def test_no_tokens_cross_nothing():
    assert crossing(ON_BOTH, None, EVEN * 0) is None


def report(member: int, routed: int, incarnation: str = "i") -> LoadReport:
    return LoadReport(
        incarnation=incarnation, member=member, generation=1, epoch=1, monotonic_seconds=0.0,
        routed=[[routed, 0]], served=[[0]],
    )  # fmt: skip


def test_origins_count_each_member_from_its_baseline():
    origins = Origins().observe([report(0, 100), report(1, 5)])
    assert origins.routed([0, 1, 2]) is None, "member 2 never reported"
    grown = origins.observe([report(0, 130), report(1, 5)])
    assert grown.routed([1, 0]).tolist() == [[[0, 0]], [[30, 0]]]
    again = grown.observe([report(0, 7, "j")])
    assert again.routed([0]).tolist() == [[[0, 0]]], "a new process begins at its first report"
    assert grown.renewed().routed([0]).tolist() == [[[0, 0]]]
