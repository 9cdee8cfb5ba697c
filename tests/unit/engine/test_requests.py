from __future__ import annotations

import logging
from typing import ClassVar

import pytest

from moe_worker.engine.events import Event, Finished, Prompt, Token, TokenLogprobs
from moe_worker.engine.observer import Unobserved
from moe_worker.engine.requests import Requests
from moe_worker.engine.sampling_params import SamplingParams
from moe_worker.engine.sequence import Sequence


def sequence(request_id: str = "a") -> Sequence:
    return Sequence(request_id, (1, 2, 3), SamplingParams(max_tokens=8))


def test_tokens_come_once_in_order_and_then_one_end() -> None:
    told: list[Event] = []
    requests, seq = Requests(Unobserved()), sequence()
    requests.add(seq, told.append)
    seq.output += [7]
    requests.tell_tokens("a")
    seq.output += [8, 9]
    requests.tell_tokens("a")
    requests.tell_tokens("a")
    requests.finish("a", "length")
    requests.finish("a", "error", "too late")
    assert told == [Token(7, 0), Token(8, 1), Token(9, 2), Finished("length", None, 3, 3)]
    assert len(requests) == 0


def test_a_computed_prompt_is_told_and_reported_once() -> None:
    class Reports(Unobserved):
        prompts: ClassVar[list[tuple[int, int]]] = []

        def prompt_computed(self, num_tokens: int, num_cached_tokens: int) -> None:
            self.prompts.append((num_tokens, num_cached_tokens))

    told: list[Event] = []
    reports = Reports()
    requests, seq = Requests(reports), sequence()
    seq.num_cached_tokens = 2
    requests.add(seq, told.append)
    requests.tell_prompt("a", (), done=False)
    assert told == []
    for _ in range(3):
        requests.tell_prompt("a", (), done=True)
    assert told == [Prompt(2)]
    assert reports.prompts == [(3, 2)]


def test_only_what_is_known_can_be_cancelled() -> None:
    requests = Requests(Unobserved())
    requests.add(sequence(), lambda event: None)
    assert requests.cancel("a")
    assert not requests.cancel("b")
    assert requests.take_cancelled() == {"a"}
    assert requests.take_cancelled() == set()


def test_an_id_in_use_is_refused() -> None:
    requests = Requests(Unobserved())
    requests.add(sequence(), lambda event: None)
    with pytest.raises(ValueError, match="in use"):
        requests.add(sequence(), lambda event: None)
    requests.drop("a")
    requests.add(sequence(), lambda event: None)


def test_a_listener_that_fails_is_cancelled_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(event: Event) -> None:
        raise RuntimeError("event loop is closed")

    requests, seq = Requests(Unobserved()), sequence()
    requests.add(seq, fail)
    seq.output += [1]
    with caplog.at_level(logging.CRITICAL + 1):
        requests.tell_tokens("a")
    assert requests.take_cancelled() == {"a"}


def test_the_prompt_is_told_once_with_what_was_cached_and_judged() -> None:
    told: list[Event] = []
    requests, seq = Requests(Unobserved()), sequence()
    seq.num_cached_tokens = 2
    requests.add(seq, told.append)
    first, second = TokenLogprobs(2, -1.0), TokenLogprobs(3, -2.0)
    requests.tell_prompt("a", [first], done=False)
    assert told == []
    requests.tell_prompt("a", [second], done=True)
    seq.output += [7]
    requests.tell_tokens("a", TokenLogprobs(7, -3.0))
    requests.tell_prompt("a", (), done=True)
    assert told == [Prompt(2, (first, second)), Token(7, 0, TokenLogprobs(7, -3.0))]
    requests.tell_prompt("nobody", (), done=True)
