"""A proxy before the real API server that can misbehave on purpose.

It speaks plain HTTP on loopback and adds the administrator's credentials, so a client under test
needs a kubeconfig without any. Nothing is faked: every answer that is not a planned fault is the
real API server's.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import aiohttp
from aiohttp import web

START_SECONDS = 10.0
HOP_HEADERS = {"transfer-encoding", "connection", "content-length", "content-encoding", "host"}


class Request(NamedTuple):
    method: str
    path: str
    watching: bool


class Fault(NamedTuple):
    """Answer this instead of asking the API server; or hold the request until `until` is set."""

    status: int = 0
    until: threading.Event | None = None


Rule = Callable[[Request], Fault | None]


class ApiProxy:
    """A context manager; `rules` are asked for each request, the first fault wins."""

    def __init__(self, url: str, token: str, authority: Path) -> None:
        self._upstream, self._token = url.rstrip("/"), token
        self._tls = ssl.create_default_context(cafile=str(authority))
        self.rules: list[Rule] = []
        self.asked: list[Request] = []
        self.url = ""
        self._muted: set[int] = set()
        self._streams: dict[int, tuple[asyncio.Transport | None, web.StreamResponse]] = {}
        self._loop = asyncio.new_event_loop()
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="api-proxy", daemon=True)

    def __enter__(self) -> ApiProxy:
        self._thread.start()
        assert self._ready.wait(START_SECONDS), "the proxy did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_SECONDS)

    def write_kubeconfig(self, file: Path) -> Path:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "proxy",
            "clusters": [{"name": "proxy", "cluster": {"server": self.url}}],
            "users": [{"name": "nobody", "user": {}}],
            "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "nobody"}}],
        }
        file.write_text(json.dumps(config))
        return file

    @property
    def open_watches(self) -> int:
        """Watches that deliver events now."""
        return len(self._streams.keys() - self._muted)

    def mute_watches(self) -> None:
        """All open watches stay open and deliver nothing any more."""
        self._do(lambda: self._muted.update(self._streams))

    def reset_watches(self) -> None:
        """All open watches break as if the machine had gone."""
        self._do(lambda: [t.abort() for t, _ in self._streams.values() if t is not None])

    def fail_watches(self, code: int) -> None:
        """All open watches hear of an error in their stream, e.g. 410: your version is too old."""
        status = {"kind": "Status", "status": "Failure", "message": "planned", "code": code}
        line = json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"

        async def fail() -> None:
            for _, response in list(self._streams.values()):
                await response.write(line)

        asyncio.run_coroutine_threadsafe(fail(), self._loop).result(START_SECONDS)
        self.mute_watches()

    def _do(self, action: Callable[[], object]) -> None:
        async def act() -> None:
            action()

        asyncio.run_coroutine_threadsafe(act(), self._loop).result(START_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        ) as self._session:
            app = web.Application(client_max_size=16 * 1024 * 1024)
            app.router.add_route("*", "/{path:.*}", self._forward)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self._ready.set()
            await self._stop.wait()
            self.reset_now()
            await runner.cleanup()

    def reset_now(self) -> None:
        for transport, _ in self._streams.values():
            if transport is not None:
                transport.abort()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        asked = Request(request.method, request.path, request.query.get("watch") == "true")
        self.asked.append(asked)
        for rule in self.rules:
            fault = rule(asked)
            if fault is None:
                continue
            if fault.until is not None:
                await asyncio.to_thread(fault.until.wait, START_SECONDS)
            if fault.status:
                return _status(fault.status)
            break
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_HEADERS}
        headers["Authorization"] = f"Bearer {self._token}"
        async with self._session.request(
            request.method,
            self._upstream + request.path_qs,
            headers=headers,
            data=await request.read() or None,
        ) as answer:
            return await self._stream(request, answer, asked.watching)

    async def _stream(
        self, request: web.Request, answer: aiohttp.ClientResponse, watching: bool
    ) -> web.StreamResponse:
        kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_HEADERS}
        if "Content-Encoding" in answer.headers:
            kept["Content-Encoding"] = answer.headers["Content-Encoding"]
        response = web.StreamResponse(status=answer.status, headers=kept)
        await response.prepare(request)
        key = id(response)
        if watching:
            self._streams[key] = (request.transport, response)
        try:
            async for chunk in answer.content.iter_any():
                if key not in self._muted:
                    await response.write(chunk)
            if key in self._muted:  # the server ended it; a dead line would not tell
                await self._stop.wait()
            await response.write_eof()
        except ConnectionError:
            pass  # the client went away, or was cut off on purpose
        finally:
            self._streams.pop(key, None)
            self._muted.discard(key)
        return response


def _status(code: int) -> web.Response:
    reasons = {404: "NotFound", 409: "Conflict", 429: "TooManyRequests", 500: "InternalError"}
    body = {
        "kind": "Status", "apiVersion": "v1", "status": "Failure",
        "reason": reasons.get(code, ""), "message": "planned by the test", "code": code,
    }  # fmt: skip
    return web.json_response(body, status=code)
