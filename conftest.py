"""Fixtures for every test: the API server, the cluster and a namespace of them."""

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.support.cluster_fixtures", "tests.support.implementations"]

# How fast this machine is at the moment fails no test.
settings.register_profile("no-clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no-clock")
