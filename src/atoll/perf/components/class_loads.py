"""Load that requests of a class put on the parts of a model: which parts, tokens, bytes between them.

Text counts as it is given. An image makes as many tokens as the encoder's rule says; a video is looked at in
groups of `temporal_patch` frames, and where images are cut into tiles every frame is one tile; a sound makes
`tokens_per_second`. Talkers read what the llm read and wrote, and make `frames_per_second` codes of speech.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

from atoll.catalog.media import EncoderSpec, GeneratorSpec
from atoll.catalog.models import ModelSpec
from atoll.catalog.transformer import TransformerSpec, kept_tokens
from atoll.core.errors import InputError
from atoll.core.ids import Phase
from atoll.perf.operators import ACTIVATION_BYTES
from atoll.workload.classes import RequestClass, parse_class_name
from atoll.workload.lengths import LengthMix

_CODE_BYTES = 4.0
"""Bytes of one code on its way from a talker to a vocoder."""


@lru_cache(maxsize=1024)
def class_routes(model: ModelSpec, klass: RequestClass) -> tuple[tuple[str, ...], ...]:
    """Return the routes that requests of a class may go: each a tuple of parts, in the order of the graph.

    With an llm there are two: with its phases together ("llm") and apart ("llm.prefill", "llm.decode").
    """
    needed = _needed(model, klass)
    order = [component.name for component in model.graph.topological_order()]
    names = tuple(name for name in order if name in needed)
    if not model.has_llm or model.llm_name not in needed:
        return (names,)
    llm = model.llm_name
    at = names.index(llm)
    phases = tuple(f"{llm}.{phase.value}" for phase in model.graph.phases(llm))
    return (names, (*names[:at], *phases, *names[at + 1 :]))


def class_parts(model: ModelSpec, klass: RequestClass) -> frozenset[str]:
    """Return every part that some route of a class has."""
    return frozenset(part for route in class_routes(model, klass) for part in route)


def component_of(part: str) -> str:
    """Return the component that a part is, or is a phase of."""
    return part.partition(".")[0]


def _needed(model: ModelSpec, klass: RequestClass) -> set[str]:
    needed: set[str] = set()
    _, wanted = parse_class_name(klass.name)
    if klass.images is not None or klass.video is not None:
        field = "images" if klass.images is not None else "video"
        found = [name for name, spec in encoders(model) if spec.kind == "vision"]
        needed |= {_first(found, model, klass, field, "looks at no images")}
    if klass.audio_s is not None:
        found = [name for name, spec in encoders(model) if spec.kind == "audio"]
        needed |= {_first(found, model, klass, "audio_s", "hears no audio")}
    if klass.image_output is not None:
        makers = [name for name, spec in generators(model) if makes_images(spec)]
        _first(makers, model, klass, "image_output", "makes no images")
        needed |= set(makers)
        needed |= {c.name for c in model.graph.sources() if is_text_encoder(model, c.name)}
        needed |= {model.llm_name} if model.has_llm else set()
    if not model.has_llm and (klass.image_output is None or "text" in wanted):
        raise InputError(
            f"model {model.name} writes no text, which class '{klass.name}' wants",
            field="classes",
            hint="name what it wants after '->', as in text -> image, or use a model with an llm",
        )
    needed |= {model.llm_name} if model.has_llm else set()
    if klass.speech_s is not None:
        speakers = _speakers(model)
        _first(speakers, model, klass, "speech_s", "does not speak")
        needed |= set(speakers)
    return needed


def _first(found: list[str], model: ModelSpec, klass: RequestClass, field: str, lacks: str) -> str:
    if not found:
        raise InputError(
            f"model {model.name} {lacks}, as class '{klass.name}' asks",
            field=field,
            hint="leave it out of the class, or use a model with that part (atoll catalog models)",
        )
    return found[0]


def encoders(model: ModelSpec) -> Iterator[tuple[str, EncoderSpec]]:
    """Yield the encoders of images and sounds, by name."""
    for name, spec in model.components.items():
        if isinstance(spec, EncoderSpec):
            yield name, spec


def generators(model: ModelSpec) -> Iterator[tuple[str, GeneratorSpec]]:
    """Yield the generators, by name."""
    for name, spec in model.components.items():
        if isinstance(spec, GeneratorSpec):
            yield name, spec


def makes_images(spec: GeneratorSpec) -> bool:
    """Return whether a generator is one of images: denoises them, or decodes them to pixels."""
    return spec.kind == "vae" or (spec.kind == "diffusion" and spec.frames_per_second is None)


def is_text_encoder(model: ModelSpec, name: str) -> bool:
    """Return whether a component is a transformer that reads the prompt once and writes nothing."""
    spec = model.components.get(name)
    return Phase.ENCODE in model.graph.phases(name) and isinstance(spec, TransformerSpec)


def _speakers(model: ModelSpec) -> list[str]:
    """The talker, and what stands behind it; where none makes codes, what makes sound of text by itself."""
    found = [name for name, spec in generators(model) if spec.kind == "autoregressive"]
    if not found:
        return [name for name, spec in generators(model) if spec.frames_per_second is not None]
    for name in found:
        found += [c.name for c in model.graph.successors(name) if c.name not in found]
    return found


def media_tokens(model: ModelSpec, klass: RequestClass) -> dict[str, float]:
    """Return, by encoder, the mean tokens that the llm sees for what a request brings beside text."""
    found: dict[str, float] = {}
    for name, spec in encoders(model):
        tokens = 0.0
        if spec.kind == "vision":
            if klass.images is not None:
                size = spec.image_tokens(klass.images.height_px, klass.images.width_px)
                tokens += klass.images.count * size
            if klass.video is not None:
                tokens += video_groups(spec, klass) * _group_tokens(spec, klass)
        elif klass.audio_s is not None:
            tokens += spec.audio_tokens(klass.audio_s)
        if tokens:
            found[name] = tokens
    return found


def video_groups(spec: EncoderSpec, klass: RequestClass) -> int:
    """Return in how many groups of frames an encoder looks at a video."""
    assert klass.video is not None
    return math.ceil(klass.video.frames / spec.temporal_patch)


def _group_tokens(spec: EncoderSpec, klass: RequestClass) -> int:
    assert klass.video is not None
    if spec.rule == "tiles":
        return spec.patches_per_tile // spec.merge**2
    return spec.image_tokens(klass.video.height_px, klass.video.width_px)


def llm_lengths(model: ModelSpec, klass: RequestClass) -> LengthMix:
    """Return the lengths that the llm sees: text and media in the prompt, text in the answer.

    The spread of a class is that of its text; tokens of media count with their mean.
    """
    if not model.has_llm:
        raise InputError(f"model {model.name} has no llm", field="classes")
    media = sum(media_tokens(model, klass).values())
    prompt = klass.input_tokens + media
    return LengthMix(
        prompt,
        klass.output_tokens,
        prompt**2 + (klass.input_cv * klass.input_tokens) ** 2,
        klass.output_tokens**2 * (1.0 + klass.output_cv**2),
    )


def speech_codes(spec: GeneratorSpec, klass: RequestClass) -> float:
    """Return the codes (or frames) of the speech that a request of a class wants."""
    if klass.speech_s is None or spec.frames_per_second is None:
        return 0.0
    return max(1.0, klass.speech_s * spec.frames_per_second)


def talker_lengths(model: ModelSpec, part: str, klass: RequestClass) -> LengthMix:
    """Return the lengths that a talker sees: what the llm read and wrote, and its own codes."""
    spec = model.components[part]
    assert isinstance(spec, GeneratorSpec)
    llm = llm_lengths(model, klass)
    codes = speech_codes(spec, klass)
    if codes == 0.0:
        raise InputError(f"the codes per second of {part} are not known", field="speech_s")
    read = llm.input_mean + llm.output_mean
    spread = (llm.input_mean_square - llm.input_mean**2) + (
        llm.output_mean_square - llm.output_mean**2
    )
    # Speech takes as long as what it says.
    square = codes**2 * llm.output_mean_square / llm.output_mean**2
    return LengthMix(read, codes, read**2 + spread, square)


def image_latents(model: ModelSpec, klass: RequestClass) -> tuple[float, float]:
    """Return latent positions and tokens of all images that a request wants."""
    wanted = klass.image_output
    assert wanted is not None
    specs = dict(generators(model))
    side = next((s.patch_size for s in specs.values() if s.kind == "vae" and s.patch_size), 8)
    patch = next(
        (s.patch_size for s in specs.values() if s.kind == "diffusion" and s.patch_size), 1
    )
    high, wide = math.ceil(wanted.height_px / side), math.ceil(wanted.width_px / side)
    tokens = math.ceil(high / patch) * math.ceil(wide / patch)
    return wanted.count * high * wide, wanted.count * tokens


def bytes_between(model: ModelSpec, klass: RequestClass) -> dict[tuple[str, str], float]:
    """Return, by (part, next part), the bytes of one request that go from one to the other.

    Embeddings of media and of prompts, the KV cache from prefill to decode, hidden states of what was read
    and written to a talker, codes to a vocoder, latents to the decoder of images.
    """
    parts = class_parts(model, klass)
    found: dict[tuple[str, str], float] = {}
    llm = model.llm_name if model.has_llm else ""
    prefill, decode = f"{llm}.prefill", f"{llm}.decode"
    read = wrote = 0.0
    if llm in parts:
        lengths = llm_lengths(model, klass)
        row = model.llm.hidden * ACTIVATION_BYTES
        read, wrote = lengths.input_mean * row, lengths.output_mean * row
        for name, tokens in media_tokens(model, klass).items():
            spec = model.components[name]
            assert isinstance(spec, EncoderSpec)
            size = tokens * spec.output_dim * ACTIVATION_BYTES
            found |= {(name, llm): size, (name, prefill): size}
        found[prefill, decode] = kv_bytes(model.llm, lengths.input_mean)
    for edge in model.graph.edges:
        if edge.src not in parts or edge.dst not in parts:
            continue
        if edge.src == llm:
            found |= {
                (llm, edge.dst): read + wrote,
                (prefill, edge.dst): read,
                (decode, edge.dst): wrote,
            }
        elif edge.dst != llm:
            found[edge.src, edge.dst] = _bytes_after(model, klass, edge.src)
    return found


def _bytes_after(model: ModelSpec, klass: RequestClass, part: str) -> float:
    spec = model.components[part]
    if isinstance(spec, TransformerSpec):
        return klass.input_tokens * spec.hidden * ACTIVATION_BYTES
    assert isinstance(spec, GeneratorSpec)
    if spec.kind == "autoregressive":
        return speech_codes(spec, klass) * (spec.codebooks or 1) * _CODE_BYTES
    positions, _ = image_latents(model, klass)
    return positions * (spec.out_channels or spec.in_channels or 1) * ACTIVATION_BYTES


def kv_bytes(spec: TransformerSpec, context: float) -> float:
    """Return the bytes that a sequence of `context` tokens keeps in all layers."""
    kept = sum(kept_tokens(window, context) for window in spec.windows)
    return kept * spec.kv_bytes_per_token_layer + spec.state_bytes_per_sequence
