"""Fixtures for every test: the API server, the cluster and a namespace of them."""

pytest_plugins = ["tests.support.cluster_fixtures"]
