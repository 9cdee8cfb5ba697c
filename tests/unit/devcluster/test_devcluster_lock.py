"""One holder at a time, also when the last one removed the file."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from devcluster.errors import DeadlineExceeded
from devcluster.lock import locked


def _silent(_message: str) -> None:
    pass


def test_a_held_lock_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "x.lock"
    with locked(path, 1, _silent, "nobody"):
        with (
            pytest.raises(DeadlineExceeded, match="somebody"),
            locked(path, 0, said.append, "somebody"),
        ):
            pytest.fail("two holders")
        assert said == [f"waiting for somebody (lock {path})"]
    with locked(path, 0, said.append, "nobody"):
        pass


def test_many_holders_that_remove_the_file_exclude_each_other(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    inside: list[int] = []
    crowds: list[int] = []

    def hold(number: int) -> None:
        for _ in range(20):
            with locked(path, 60, _silent, "another"):
                inside.append(number)
                crowds.append(len(inside))
                inside.remove(number)
                path.unlink()

    threads = [threading.Thread(target=hold, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert crowds == [1] * 80
    assert not path.exists()
