"""Hugging Face's Text Generation Inference: recognised where somebody else runs it, never started."""

from __future__ import annotations

import re
from typing import ClassVar

from atoll.engines.engine import Engine


class Tgi(Engine):
    """TGI; to a gateway it is any OpenAI server."""

    name = "tgi"
    title = "TGI"
    backend_kind = "openai"
    program = re.compile(r"text-generation-(launcher|router)")
    default_port = 3000
    detail_paths = ("/info",)
    router = "text-generation"
    metrics: ClassVar = {"running": ("tgi_batch_current_size",), "waiting": ("tgi_queue_size",)}


ENGINE = Tgi()
