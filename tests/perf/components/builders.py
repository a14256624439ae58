"""Requests and executors of the tests."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.catalog.catalog import Catalog
from atoll.catalog.models import ModelSpec
from atoll.catalog.nodes import NodeType
from atoll.perf.components.executor import ExecutorWork, executor_work
from atoll.workload.classes import ImageOutput, Images, RequestClass, Video

TEXT = RequestClass(name="text", share=1.0, input_tokens=1000, output_tokens=100)
IMAGE = RequestClass(
    name="image+text",
    share=1.0,
    input_tokens=300,
    output_tokens=150,
    images=Images(count=1, width_px=840, height_px=560),
)
VIDEO = RequestClass(name="video+text", share=1.0, video=Video())
AUDIO = RequestClass(name="audio+text", share=1.0, audio_s=8.0)
SPEECH = RequestClass(
    name="text -> audio", share=1.0, input_tokens=500, output_tokens=100, speech_s=30.0
)
PICTURE = RequestClass(
    name="text -> image",
    share=1.0,
    input_tokens=500,
    image_output=ImageOutput(width_px=512, height_px=512, steps=20),
)


def model(name: str) -> ModelSpec:
    """A model of the catalog."""
    return Catalog.default().model(name)


def node(name: str) -> NodeType:
    """A node type of the catalog."""
    return Catalog.default().node(name)


def work(
    name: str,
    parts: Sequence[str],
    on: str,
    *classes: RequestClass,
    tp: int | None = None,
    engine: str = "vllm",
) -> ExecutorWork:
    """What an executor carries; it must fit."""
    found = executor_work(model(name), parts, node(on), classes, tp=tp, engine=engine)
    assert found is not None
    return found
