"""A line of the log is one JSON object with the keys by which an incident is found."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from moe_api import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What the root logger writes while it is ours."""
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    written = io.StringIO()
    logs.configure("info", {"deployment": "d", "group": 0, "member": 2}, written)
    yield written
    root.setLevel(before[0])
    root.handlers[:] = before[1]


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_every_line_carries_who_wrote_it_and_what_it_is_about(stream: io.StringIO) -> None:
    logger = logging.getLogger("moe_worker.test")
    logger.info("ended: %s", "stop", extra={"request_id": "r-1", "reason": "stop"})
    logger.debug("not shown")
    [line] = lines(stream)
    wanted = {
        "level": "info", "logger": "moe_worker.test", "message": "ended: stop", "deployment": "d",
        "group": 0, "member": 2, "request_id": "r-1", "reason": "stop",
    }  # fmt: skip
    assert wanted.items() <= line.items()
    assert str(line["time"]).endswith("+00:00")


def test_a_line_about_another_group_says_so(stream: io.StringIO) -> None:
    logging.getLogger("moe_operator.test").info("pod created", extra={"group": 1, "member": None})
    [line] = lines(stream)
    assert (line["group"], line["member"]) == (1, 2), "None says nothing new"


def test_an_exception_stays_on_its_line(stream: io.StringIO) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("moe_operator.test").exception("failed")
    [line] = lines(stream)
    assert line["level"] == "error"
    assert "ValueError: two\nlines" in str(line["exception"])
