"""What tests of replicas share: Ray Serve, and the processes behind a server."""

import importlib.util

import psutil
import pytest

NEEDS_RAY_SERVE = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("grpc_reflection") is None, reason="needs Ray Serve (ray[serve])"
    ),
]


def replicas_of(process):
    """Return the processes behind a server, in the order of their ids."""
    children = psutil.Process(process.pid).children(recursive=True)
    found = [one for one in children if one.name().startswith("ray::ServeReplica")]
    return sorted(found, key=lambda one: one.pid)
