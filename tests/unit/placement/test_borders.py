from __future__ import annotations

from moe_placement.topology.borders import domains_at, near


def test_domains_are_numbered_as_they_appear():
    ranks = [["z1", "a"], ["z1", "b"], ["z2", "a"], ["z1", "a"]]
    assert domains_at(ranks, 0).tolist() == [0, 0, 1, 0]
    assert domains_at(ranks, 1).tolist() == [0, 1, 2, 0], "host a of zone z2 is another one"


def test_the_border_is_the_narrowest_that_joins_and_parts():
    assert near([["z", "a"], ["z", "a"], ["z", "b"], ["z", "b"]]).tolist() == [0, 0, 1, 1]
    one_rank_a_host = [["z1", "a"], ["z1", "b"], ["z2", "c"], ["z2", "d"]]
    assert near(one_rank_a_host).tolist() == [0, 0, 1, 1], "hosts join nobody"


def test_without_a_border_all_are_together():
    assert near([["z", "a"], ["z", "b"], ["z", "c"]]).tolist() == [0, 0, 0]
    assert near([["z"], ["z"]]).tolist() == [0, 0]
    assert near([[], [], []]).tolist() == [0, 0, 0]


def test_a_rank_of_a_node_nobody_knows_is_in_a_domain_without_a_name():
    assert near([["z1", ""], ["z1", "a"], ["z1", "a"], ["", ""]]).tolist() == [0, 1, 1, 2]
    assert domains_at([["z"], []], 1).tolist() == [0, 1]
