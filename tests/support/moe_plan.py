"""Calling `moe-plan` in this process, as a shell would."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any, NamedTuple

from moe_placement.command.main import main


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


def moe_plan(*arguments: object) -> Done:
    """Exit code, stdout and stderr of `moe-plan ARGUMENTS…`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int)
    return Done(code, out.getvalue(), err.getvalue())


def refused(done: Done, *words: str) -> None:
    """Assert that the input was refused: code 2, one line on stderr that has all `words`."""
    assert done.code == 2, done
    assert done.out == ""
    assert done.err.count("\n") == 1, done.err
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err, f"{word!r} is not in {done.err!r}"
