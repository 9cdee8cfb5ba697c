"""What keeps a measurement from beginning, told in one line: flag, value, way out."""

from __future__ import annotations


class BenchError(ValueError):
    """Bad input, or a server that can not be measured; the command exits with 2."""
