"""Staging one epoch on one rank: where weights come from, and what does not count as arrived."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from moe_placement.walk.migration import Move
from moe_worker.expert.bank import ExpertBank
from moe_worker.expert.migrate import Cancelled, Pace, PeerWeights, PullFailed, Source, Staging
from moe_worker.model.weights import ExpertWeights

TOKEN = "secret"


def weights(value: float) -> ExpertWeights:
    return ExpertWeights(torch.full((4, 3), value), torch.full((3, 2), -value))


def bank() -> ExpertBank:
    return ExpertBank(num_layers=1, num_slots=3, intermediate=2, hidden=3, dtype=torch.float32)


class Holder(BaseHTTPRequestHandler):
    """A peer with expert 5 in slot 1 and a set of bad habits."""

    mode = "honest"
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        held = bank()
        held.write(0, 1, weights(5.0))
        held.in_force_LS = np.asarray([[-1, 5, -1]], dtype=np.int32)
        body = held.read_live(0, 1, 5) or b""
        digest = hashlib.sha256(body).hexdigest()
        if self.mode == "refuses" or self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.send_error(409)
            return
        if self.mode == "flips a bit":
            body = bytes([body[0] ^ 1]) + body[1:]
        if self.mode == "is short":
            body = body[:-1]
        if self.mode == "is long":
            body += b"x"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        if self.mode != "gives no checksum":
            self.send_header("x-moe-checksum", digest)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def holder() -> Iterator[type[Holder]]:
    kind = type("OneHolder", (Holder,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    kind.port = server.server_port
    yield kind
    server.shutdown()
    thread.join()
    server.server_close()


def staging(holder: type[Holder], sources: tuple[tuple[int, int], ...], into: ExpertBank,
            wait: object = None) -> Staging:  # fmt: skip
    return Staging(
        moves=[Move(layer=0, expert=5, rank=0, slot=2, sources=sources)],
        own_rank=0,
        addresses=["127.0.0.9", "127.0.0.1", "127.0.0.1"],
        in_force=(3, 7),
        bank=into,
        read_checkpoint=lambda layer, expert: weights(100.0 + expert),
        peers=PeerWeights(TOKEN, holder.port),
        max_bytes_per_second=1e9,
        wait=wait or threading.Event().wait,
        on_bytes=lambda count: None,
    )


def test_a_peer_gives_what_it_holds_under_the_plan_in_force(holder: type[Holder]) -> None:
    into = bank()
    work = staging(holder, ((1, 1),), into)
    work.run()
    assert into.w13_LS2IH[0][2].eq(5.0).all()
    assert into.w2_LSHI[0][2].eq(-5.0).all()
    assert (work.moves_done, work.num_bytes, work.complete) == (1, into.bytes_per_expert, True)
    assert holder.asked == ["/control/v1/experts/0/1?expert=5&generation=3&epoch=7"]


@pytest.mark.parametrize(
    "mode", ["refuses", "flips a bit", "is short", "is long", "gives no checksum"]
)
def test_bad_bytes_never_arrive_and_the_checkpoint_is_the_last_resort(
    holder: type[Holder], mode: str
) -> None:
    holder.mode = mode
    with pytest.raises(PullFailed):
        PeerWeights(TOKEN, holder.port).pull(
            Source("127.0.0.1", 0, 1, 5, 3, 7), bank().bytes_per_expert, lambda n: None
        )
    into = bank()
    staging(holder, ((1, 1), (2, 1)), into).run()
    assert len(holder.asked) == 3, "both holders were asked"
    assert into.w13_LS2IH[0][2].eq(105.0).all()


def test_an_unreachable_peer_is_passed_over(holder: type[Holder]) -> None:
    dead = PeerWeights(TOKEN, 1)
    with pytest.raises(PullFailed, match="Connect"):
        dead.pull(Source("127.0.0.1", 0, 1, 5, 3, 7), 10, lambda n: None)


def test_an_expert_that_lies_here_already_is_copied(holder: type[Holder]) -> None:
    into = bank()
    into.write(0, 0, weights(7.0))
    staging(holder, ((0, 0), (1, 1)), into).run()
    assert into.w13_LS2IH[0][2].eq(7.0).all()
    assert holder.asked == []


def test_called_off_means_nothing_is_written(holder: type[Holder]) -> None:
    into = bank()
    work = staging(holder, ((1, 1),), into, wait=lambda seconds: True)
    with pytest.raises(Cancelled):
        work.run()
    assert into.w13_LS2IH[0][2].eq(0.0).all()
    assert not work.complete


def test_the_pace_keeps_a_rate_over_time() -> None:
    pace = Pace(max_bytes_per_second=100.0, started_seconds=10.0)
    assert pace.delay(50, now_seconds=10.0) == 0.5
    assert pace.delay(50, now_seconds=10.5) == 0.5
    assert pace.delay(10, now_seconds=20.0) == 0.0


def test_a_slot_is_read_only_while_the_table_in_force_has_the_expert_there() -> None:
    held = bank()
    held.write(0, 1, weights(5.0))
    assert held.read_live(0, 1, 5) is None
    held.in_force_LS = np.asarray([[-1, 5, -1]], dtype=np.int32)
    raw = held.read_live(0, 1, 5)
    assert raw is not None
    assert torch.equal(held.from_bytes(bytearray(raw)).w13_2IH, weights(5.0).w13_2IH)
    for layer, slot, expert in ((0, 1, 4), (0, 0, 5), (0, 9, 5), (1, 1, 5), (0, 0, -1)):
        assert held.read_live(layer, slot, expert) is None
    with pytest.raises(ValueError, match="an expert here has"):
        held.from_bytes(bytearray(7))


def test_a_resized_bank_keeps_what_it_has() -> None:
    held = bank()
    held.write(0, 1, weights(5.0))
    held.in_force_LS = np.asarray([[-1, 5, -1]], dtype=np.int32)
    held.resize(5)
    assert held.num_slots == 5
    assert held.in_force_LS.tolist() == [[-1, 5, -1, -1, -1]]
    assert held.w2_LSHI[0][1].eq(-5.0).all()
    held.resize(2)
    assert held.in_force_LS.tolist() == [[-1, 5]]
