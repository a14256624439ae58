"""Which components stand for the parts of a model, and which tasks answer for it.

A plan speaks of parts: vision, audio, llm, speech. What runs are components (`atoll.components`). For the
model that Atoll brings along the two are known; for others they are named in a file, or small ones stand in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from atoll.catalog.media import EncoderSpec, GeneratorSpec
from atoll.catalog.models import ModelSpec
from atoll.components.component_registry import COMPONENTS
from atoll.core.errors import UnknownNameError, UsageError
from atoll.core.frozen import Frozen
from atoll.core.graph import ComponentKind
from atoll.runtime.graph_server.graph_config import Endpoint

OWN_MODEL = "smollm2-assistant"
"""The model whose parts Atoll fetches by itself."""
_EARS = ("silero-vad", "moonshine-encoder", "moonshine-decoder")
_OPTIONS: dict[str, dict[str, object]] = {
    # Moonshine hears words in silence: first somebody listens whether anybody speaks.
    "silero-vad": {"voice_activity": True},
    # Known before anything is drawn, so that other sizes are refused at once.
    "terrain-diffusion": {"image_sizes": ["128x128"]},
    "transformers-vision": {"see": "transformers-vision"},
    "transformers-chat": {"think": "transformers-chat"},
    "vllm-chat": {"think": "vllm-chat"},
    "whisper-encoder": {"hear_encoder": "whisper-encoder"},
    "whisper-decoder": {"hear_decoder": "whisper-decoder"},
}
TASKS: dict[Endpoint, str] = {
    "chat": "atoll.tasks.library.assistant:SpeakingAssistant",
    "transcriptions": "atoll.tasks.library.transcription:Transcription",
    "speech": "atoll.tasks.library.speech:Speech",
    "images": "atoll.tasks.library.drawing:Drawing",
    "embeddings": "atoll.tasks.library.embedding:Embedding",
}
"""The library's task for each endpoint."""
NEEDS: dict[Endpoint, tuple[frozenset[str], ...]] = {
    "chat": tuple(frozenset({llm}) for llm in ("smollm2", "transformers-chat", "vllm-chat")),
    "transcriptions": (
        frozenset({"moonshine-encoder", "moonshine-decoder"}),
        frozenset({"whisper-encoder", "whisper-decoder"}),
    ),
    "speech": (frozenset({"hibari"}),),
    "images": (frozenset({"terrain-diffusion"}),),
    "embeddings": (frozenset({"minilm"}),),
}
"""Components with which the library's task for an endpoint can do something: any of these sets will do."""


class ServedParts(Frozen):
    """Components of every part of a model (none where a part is nothing here), and its tasks.

    settings: options of components, of those that have some. `stand_in` says instead of what, where they are
    not the model's own.
    """

    parts: dict[str, tuple[str, ...]]
    settings: dict[str, dict[str, Any]] = Field(default_factory=dict)
    tasks: dict[Endpoint, str] = Field(min_length=1)
    options: dict[str, object] = Field(default_factory=dict)
    stand_in: str | None = None


def own_parts() -> ServedParts:
    """Return what stands for the model that Atoll brings along."""
    parts = {
        "vision": ("smollm2-vision",),
        "audio": _EARS,
        "llm": ("smollm2",),
        "speech": ("hibari",),
    }
    known = [name for names in parts.values() for name in names]
    return ServedParts(parts=parts, tasks=tasks_over(known), options=options_over(known))


def tasks_over(components: Sequence[str]) -> dict[Endpoint, str]:
    """Return the library's tasks that these components can do."""
    there = set(components)
    return {
        endpoint: task
        for endpoint, task in TASKS.items()
        if any(needed <= there for needed in NEEDS[endpoint])
    }


def options_over(components: Sequence[str]) -> dict[str, object]:
    """Return the options of the library's tasks that go with these components."""
    found: dict[str, object] = {}
    for name in components:
        found |= _OPTIONS.get(name, {})
    return found


def stand_in_parts(model: ModelSpec) -> ServedParts:
    """Return small components that stand for the parts of any model, by what each part does."""
    parts: dict[str, tuple[str, ...]] = {}
    for component in model.graph.components:
        spec = model.components[component.name]
        if component.kind is ComponentKind.LLM:
            parts[component.name] = ("smollm2",)
        elif isinstance(spec, EncoderSpec):
            parts[component.name] = ("smollm2-vision",) if spec.kind == "vision" else _EARS
        elif isinstance(spec, GeneratorSpec):
            parts[component.name] = _generator(model, component.name, spec)
        else:
            # Encoders of text: the stand-in of what they feed reads text itself.
            parts[component.name] = ()
    known = tuple(name for names in parts.values() for name in names)
    return ServedParts(
        parts=parts,
        tasks=tasks_over(known),
        options=options_over(known),
        stand_in=f"{OWN_MODEL}'s parts instead of {model.name}",
    )


def _generator(model: ModelSpec, name: str, spec: GeneratorSpec) -> tuple[str, ...]:
    if spec.kind == "autoregressive" and model.graph.successors(name):
        return ()  # codes that the vocoder behind it makes sound of: it reads the text here
    if spec.frames_per_second is not None or spec.kind in ("autoregressive", "vocoder"):
        return ("hibari",)
    if spec.kind == "diffusion":
        return ("terrain-diffusion",)
    return ()


def choose_parts(
    service: str,
    model: ModelSpec,
    given: Mapping[str, ServedParts],
    *,
    stand_in: bool,
) -> ServedParts:
    """Return what stands for the model of a service: as given, its own, or stand-ins where asked for."""
    if service in given:
        chosen = given[service]
    elif model.name == OWN_MODEL:
        chosen = own_parts()
    elif stand_in:
        chosen = stand_in_parts(model)
    else:
        raise UsageError(
            f"nothing here runs the parts of {model.name} ({service})",
            hint=f"name components for them with `parts` FILE, serve the model {OWN_MODEL}, "
            "or try the plan with small parts by `stand_in`",
        )
    names = [component.name for component in model.graph.components]
    for part in chosen.parts:
        if part not in names:
            raise UnknownNameError(f"part of {model.name}", part, names, field="parts")
    for part in names:
        if part not in chosen.parts:
            raise UsageError(
                f"no component is named for the part '{part}' of {model.name}",
                field=f"{service}.parts",
                hint="name one, or give it an empty list where it is nothing here",
            )
    for part, components in chosen.parts.items():
        for name in components:
            if name not in COMPONENTS and ":" not in name:
                raise UnknownNameError(
                    "component", name, COMPONENTS, field=f"{service}.parts.{part}"
                )
    return chosen
