"""Server-sent events out of bytes that are cut anywhere, as the HTML standard (9.2.6) parses them.

Only data is of interest: event names, ids and comments are skipped. What a stream that ends in the
middle of an event leaves behind is no event.
"""

from __future__ import annotations

import re

MAX_EVENT_BYTES = 4 * 2**20
_LINE_END = re.compile(rb"\r\n|\n|\r")


class NotEvents(ValueError):
    """The bytes are no server-sent events of a size that is believable."""


class EventParser:
    def __init__(self) -> None:
        self._line = b""
        self._data: list[bytes] = []
        self._num_bytes = 0
        """Of the event under way, its complete lines."""
        self._after_return = False
        """The last byte was a carriage return: a newline now belongs to it."""

    def push(self, received: bytes) -> list[str]:
        """The data of the events that `received` completes.

        Raises:
            NotEvents: an event is larger than MAX_EVENT_BYTES, or is not UTF-8.
        """
        if not received:
            return []
        if self._after_return and received.startswith(b"\n"):
            received = received[1:]
            self._after_return = False
            if not received:
                return []
        self._after_return = received.endswith(b"\r")
        *lines, self._line = _LINE_END.split(self._line + received)
        events = [event for line in lines if (event := self._take(line)) is not None]
        if self._num_bytes + len(self._line) > MAX_EVENT_BYTES:
            raise NotEvents(f"an event is larger than {MAX_EVENT_BYTES} bytes")
        return events

    def _take(self, line: bytes) -> str | None:
        if not line:
            return self._event()
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._num_bytes += len(line)
        return None

    def _event(self) -> str | None:
        if not self._data:
            return None
        data, self._data, self._num_bytes = b"\n".join(self._data), [], 0
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise NotEvents(f"an event is not UTF-8: {data[:60]!r}") from error
