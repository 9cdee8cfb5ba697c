"""What can go wrong, told to the person who runs a cluster: what happened and the way out."""

from __future__ import annotations


class ClusterError(Exception):
    """Base of all errors that end a command with a message and without a traceback."""


class Unsupported(ClusterError):
    """This machine or user cannot run what was asked for."""


class BuildFailed(ClusterError):
    """The cluster's binary could not be built."""


class CommandFailed(ClusterError):
    """A program that was run for its effect returned an error."""


class ComponentDied(ClusterError):
    """A process of the cluster ended although nobody asked it to."""


class DeadlineExceeded(ClusterError):
    """A condition did not come true in time."""


class NotRunning(ClusterError):
    """The instance does not exist, or is only half there."""
