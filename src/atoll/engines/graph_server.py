"""Atoll's graph server: tasks over executors of any-to-any models (`runtime.graph_server`)."""

from __future__ import annotations

from atoll.engines.engine import Engine


class GraphServer(Engine):
    """A graph server, which moves what breaks off between its executors itself.

    Its /health says how its executors are, which it replaces while requests wait; so it is asked what it
    serves.
    """

    name = "tasks"
    title = "a graph server"
    health_path = "/v1/models"
    has_status = True
    resume = "repeat"
    repeats_speech = True


ENGINE = GraphServer()
