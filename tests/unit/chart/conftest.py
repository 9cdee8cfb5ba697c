"""Helm for the tests of the chart."""

from __future__ import annotations

import pytest

from tests.support.chart import Chart, find_chart


@pytest.fixture(scope="session")
def chart() -> Chart:
    return find_chart()
