"""The server that is measured, as flags name it, and the body of a request to it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from moe_worker.bench.prompts import Prompt


class Endpoint(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def route(self) -> str:
        return "chat/completions" if self is Endpoint.CHAT else "completions"


@dataclass(frozen=True)
class Sampling:
    temperature: float
    ignore_eos: bool
    """Sent only when set: not every server takes it."""
    include_usage: bool


@dataclass(frozen=True)
class Target:
    base_url: str
    """Ends with `/v1`, or with whatever stands before `models`."""
    endpoint: Endpoint
    model: str
    sampling: Sampling

    @property
    def url(self) -> str:
        return f"{self.base_url}/{self.endpoint.route}"

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """Of one request, as JSON."""
        content: dict[str, Any] = {"prompt": prompt.content}
        if self.endpoint is Endpoint.CHAT:
            messages = prompt.content
            if isinstance(messages, str):
                messages = [{"role": "user", "content": messages}]
            content = {"messages": messages}
        return {
            "model": self.model,
            **content,
            "max_tokens": prompt.max_tokens,
            "temperature": self.sampling.temperature,
            "stream": True,
            **({"stream_options": {"include_usage": True}} if self.sampling.include_usage else {}),
            **({"ignore_eos": True} if self.sampling.ignore_eos else {}),
        }


def parse_url(text: str) -> str:
    """`http://host:8000` or `http://host:8000/v1` → the latter.

    Raises:
        ValueError: naming what is wrong.
    """
    import httpx  # a good part of the command's start: help does without

    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, ValueError) as error:
        raise ValueError(f"{text!r} is no URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or not 0 < (url.port or 80) < 65536:
        raise ValueError(f"{text!r} is not like http://127.0.0.2:8000")
    if url.userinfo or url.query or url.fragment:
        raise ValueError(
            f"a URL ends with its path and has no user in it, unlike {url.copy_with(password=None)}"
        )
    path = url.path.rstrip("/")
    return str(url.copy_with(path=path if path.endswith("/v1") else f"{path}/v1"))
