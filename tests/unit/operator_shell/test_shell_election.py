"""Leadership on paper: two candidates, one record, and clocks that disagree."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace

from moe_operator.election import Election, Record
from moe_operator.settings import LeaseSettings

SETTINGS = LeaseSettings(duration_seconds=15, renew_deadline_seconds=10, retry_seconds=2)
NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)


@dataclass
class Api:
    """The one record, with the API server's conditional writes."""

    stored: Record | None = None
    version: int = 0

    def write(self, record: Record) -> Record | None:
        """The stored record, or None for a conflict."""
        if (self.stored.version if self.stored else "") != record.version:
            return None
        self.version += 1
        self.stored = replace(record, version=str(self.version))
        return self.stored


@dataclass
class Candidate:
    api: Api
    name: str
    skew: datetime.timedelta = datetime.timedelta()
    monotonic_offset: float = 0.0
    """Every process counts its monotonic clock from somewhere else."""

    def __post_init__(self) -> None:
        self.election = Election(self.name, SETTINGS)
        self.leads = False

    def now(self, t: float) -> float:
        return t + self.monotonic_offset

    def wall(self, t: float) -> datetime.datetime:
        return NOON + datetime.timedelta(seconds=t) + self.skew

    def tick(self, t: float) -> None:
        if self.leads:
            written = self.api.write(self.election.renewal(self.wall(t)))
            if written is not None:
                self.election.renewed(written, self.now(t))
            else:
                self.leads = self.election.adopt(self.api.stored)
            return
        self.election.observe(self.api.stored, self.now(t))
        claim = self.election.claim(self.api.stored, self.now(t), self.wall(t))
        written = self.api.write(claim) if claim else None
        if written is not None:
            self.election.won(written, self.now(t))
            self.leads = True

    def may_write(self, t: float) -> bool:
        return self.election.holds(self.now(t))


def test_the_first_candidate_creates_the_record_and_a_second_waits() -> None:
    api = Api()
    a, b = Candidate(api, "a"), Candidate(api, "b")
    a.tick(0)
    b.tick(1)
    assert a.leads
    assert not b.leads
    assert api.stored is not None
    assert (api.stored.holder, api.stored.transitions) == ("a", 0)


def test_f06_no_takeover_while_the_leader_renews_however_wrong_the_clocks_are() -> None:
    for minutes in (-5, 5):
        api = Api()
        a = Candidate(api, "a")
        b = Candidate(api, "b", datetime.timedelta(minutes=minutes), monotonic_offset=1e6)
        a.tick(0)
        for t in range(1, 600, 2):
            a.tick(t)
            b.tick(t + 0.5)
            assert a.may_write(t + 0.5)
            assert not b.leads


def test_a_standby_takes_over_one_duration_after_the_last_change_it_saw() -> None:
    api = Api()
    a, b = Candidate(api, "a"), Candidate(api, "b", monotonic_offset=-50.0)
    a.tick(0)
    a.tick(2)
    b.tick(3)
    b.tick(17.9)
    assert not b.leads
    b.tick(18)
    assert b.leads
    assert api.stored is not None
    assert api.stored.transitions == 1
    assert not a.may_write(12)  # long before: its renew deadline is shorter than the duration


def test_the_old_leader_stops_to_write_before_the_new_one_begins() -> None:
    """For every moment of the last renewal and every phase of the standby's looks."""
    for phase in (0.0, 0.5, 1.0, 1.5):
        api = Api()
        a, b = Candidate(api, "a"), Candidate(api, "b")
        a.tick(0)
        a.tick(2)  # the last renewal; then the leader is cut off
        t = 2 + phase
        while not b.leads:
            b.tick(t)
            t += 2
        assert not a.may_write(t - 2)


def test_only_one_of_two_waiting_candidates_wins() -> None:
    api = Api()
    a, b, c = Candidate(api, "a"), Candidate(api, "b"), Candidate(api, "c")
    a.tick(0)
    b.tick(1)
    c.tick(1)
    claims = [x.election.claim(api.stored, x.now(30), x.wall(30)) for x in (b, c)]
    assert None not in claims
    assert [api.write(claim) is not None for claim in claims if claim] == [True, False]


def test_a_released_lease_is_taken_at_once() -> None:
    api = Api()
    a, b = Candidate(api, "a"), Candidate(api, "b")
    a.tick(0)
    b.tick(1)
    assert api.write(a.election.release()) is not None
    b.tick(3)
    assert b.leads
    assert api.stored is not None
    assert api.stored.transitions == 1


def test_a_deleted_record_is_believed_until_it_would_have_expired() -> None:
    api = Api()
    a, b = Candidate(api, "a"), Candidate(api, "b")
    a.tick(0)
    b.tick(1)
    api.stored = None
    b.tick(10)
    assert not b.leads
    b.tick(16)
    assert b.leads


def test_a_leader_whose_answer_was_lost_recognises_its_own_record() -> None:
    api = Api()
    a = Candidate(api, "a")
    a.tick(0)
    api.write(a.election.renewal(a.wall(2)))  # stored, but the answer never came
    a.tick(4)  # refused: the version moved on
    assert a.leads
    a.tick(6)
    assert a.may_write(15)


def test_a_leader_that_finds_another_holder_gives_up() -> None:
    api = Api()
    a, b = Candidate(api, "a"), Candidate(api, "b")
    a.tick(0)
    b.tick(0)
    b.tick(15)
    a.tick(16)
    assert b.leads
    assert not a.leads


def test_the_record_survives_the_wire() -> None:
    record = Record("a", 3, 15, "2026-01-01T12:00:00.000000Z", "2026-01-01T12:00:02.000000Z", "7")
    assert Record.from_wire(record.to_wire("ns", "lease")) == record
