"""Any server that speaks OpenAI's API and of which nothing else is known."""

from __future__ import annotations

from atoll.engines.engine import Engine


class OpenAIServer(Engine):
    """A backend at a URL. It may have no /health, so it is asked what it serves."""

    name = "openai"
    title = "an OpenAI server"
    detail_paths = ("/info", "/version", "/props")
    health_path = "/v1/models"
    resume = "repeat"


ENGINE = OpenAIServer()
