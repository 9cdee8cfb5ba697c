"""The one error of `moe-plan`: input that can not be used as it is."""

from __future__ import annotations


class UsageError(ValueError):
    """A flag or file that can not be used; one line that names it, its value and the way out."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
