"""A real Kubernetes of several nodes on one Linux machine, for the demo and the tests.

Standard library only: it runs with the system's Python before the project is installed.
`python -m devcluster --help` is the door for people, `devcluster.cluster` the one for programs.
"""
