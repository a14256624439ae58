"""How long batches take at parts that work on whole requests: encoders, denoisers, vocoders, VAEs.

The unit is what a request of a class brings to a part: all its images, all its speech. n requests together
take

    t(n) = fixed + n item                      `rounds` times, where a part denoises in steps

which is the line through t(1) and t(N) with N the largest batch; times are convex in n,
so in between the line is no faster than they are. Beside the GPU, `Host` counts what an engine does for every
request and every pixel before it can start.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from atoll.catalog.media import EncoderSpec, GeneratorSpec
from atoll.catalog.models import ModelSpec
from atoll.catalog.transformer import TransformerSpec
from atoll.core.errors import InputError
from atoll.perf.batch import Batch
from atoll.perf.components.class_loads import (
    image_latents,
    is_text_encoder,
    media_tokens,
    speech_codes,
    video_groups,
)
from atoll.perf.components.kernels import (
    BLOCK_LAUNCHES,
    BLOCK_PASSES,
    DECODER_S,
    LAUNCH_S,
    Kernels,
)
from atoll.perf.layers import splits_evenly
from atoll.perf.operators import ACTIVATION_BYTES
from atoll.perf.step import analytic, step_seconds
from atoll.workload.classes import RequestClass

MAX_IMAGES = 8
"""Requests that an engine denoises together at most, where memory and promises allow; an assumption."""
MAX_SPEECH = 16
"""Requests whose speech a vocoder makes together at most; an assumption."""
LARGEST_INPUT = 32_768
"""Tokens of the largest single input that an engine prepares for, where the llm's context is longer."""
LIVE_HIDDENS = 20.6
"""Activations alive at once for a position of that input, in hidden sizes. Fitted to one figure, with low
confidence: Cornserve's scripts note KV cache for 280,000 tokens of InternVL3-38B on two A100-80, and for
105,000
with its encoder beside it, of which the encoder's weights explain 43,000."""
LARGEST_INPUT_SHARE = 0.5
"""Share of the memory left beside weights that is set aside for it at most: who has less limits the input."""
_LIVE_ROWS = 4.0
_PIXEL_BYTES = 4.0 * 96.0 * ACTIVATION_BYTES
_AUDIO_POSITIONS_S = 30.0


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds that an engine's host takes around an encoder, for every request and every megapixel.

    Requests are taken apart and embeddings handed on; pictures are resized, normalised and cut into patches,
    one request after another, in a process beside the one that drives the GPU: the longer of the two sets the
    rate, and a request alone waits for both. Both figures are fitted, each to one number of Cornserve's table
    1 for Qwen2.5-Omni (on hosts of A100-80): `request_s` to its audio encoder, `megapixel_s` to its videos.
    Confidence is low.
    """

    request_s: float = 0.0294
    megapixel_s: float = 0.048


ENGINE_HOST = Host()


@dataclass(frozen=True, slots=True)
class BatchTime:
    """Batches of requests of one class at one part: `rounds` times `fixed_s` + `item_s` for each request.

    `request_bytes` are bytes of activations that one request takes on each GPU while it is there. A request
    alone takes `lead_s` more: what host and GPU do for several requests at the same time.
    """

    fixed_s: float
    item_s: float
    max_batch: int
    rounds: int
    request_bytes: float
    grounds: str = ""
    lead_s: float = 0.0

    @property
    def alone_s(self) -> float:
        """Seconds of one request while nothing else is there."""
        return self.lead_s + self.seconds(1.0)

    def seconds(self, requests: float) -> float:
        """Return the seconds of a batch of so many requests, all rounds of it."""
        return self.rounds * (self.fixed_s + requests * self.item_s)

    def largest_within(self, budget_s: float) -> int:
        """Return the largest batch that takes no longer than `budget_s`, 0 where one alone does."""
        if self.seconds(1.0) > budget_s:
            return 0
        if self.item_s <= 0.0:
            return self.max_batch
        room = (budget_s / self.rounds - self.fixed_s) / self.item_s
        # Rounding must not cost a request.
        return max(1, math.floor(min(self.max_batch, room + 1e-9)))


def largest_input_bytes(spec: EncoderSpec, context: int) -> float:
    """Return bytes per GPU that engines set aside beside an llm for an encoder's largest input.

    They try it out when they start: a video (or a sound) that fills the llm's context.
    """
    tokens = min(context, LARGEST_INPUT)
    positions = float(tokens) * spec.merge**2
    if spec.kind == "audio" and spec.max_positions is not None and spec.tokens_per_second:
        positions *= spec.max_positions / _AUDIO_POSITIONS_S / spec.tokens_per_second
    return positions * LIVE_HIDDENS * spec.hidden * ACTIVATION_BYTES


def batch_time(
    model: ModelSpec,
    part: str,
    klass: RequestClass,
    kernels: Kernels,
    *,
    max_tokens: int,
    host: Host = ENGINE_HOST,
) -> BatchTime:
    """Return how long batches of requests of a class take at a part that generates no tokens.

    `max_tokens` is what the engine puts into a step: an encoder takes as many requests at a time.
    """
    spec = model.components[part]
    if isinstance(spec, EncoderSpec):
        return _encoder(spec, media_tokens(model, klass)[part], klass, kernels, max_tokens, host)
    if isinstance(spec, TransformerSpec):
        if not is_text_encoder(model, part):
            raise InputError(f"{part} of model {model.name} generates tokens", field="part")
        return _text(spec, klass, kernels, max_tokens)
    if spec.kind == "vae":
        return _pixels(spec, klass, kernels)
    if spec.frames_per_second is not None:
        return _speech(spec, klass, kernels)
    if spec.kind == "diffusion":
        return _denoise(model, spec, klass, kernels)
    raise InputError(
        f"the shapes of {part} of model {model.name} are not public",
        field="model",
        hint="give a measured rate for it",
    )


def _line(
    seconds: Callable[[float], float],
    max_items: int,
    *,
    rounds: int,
    request_bytes: float,
    grounds: str,
    host_s: float = 0.0,
) -> BatchTime:
    """The line through the times of one request and of the largest batch."""
    alone = seconds(1.0)
    item = (seconds(float(max_items)) - alone) / (max_items - 1) if max_items > 1 else alone
    # A batch is never slower than its requests one after the other.
    item = min(item, alone)
    fixed = max(0.0, alone - item)
    # Host and GPU work side by side: the longer sets the rate, and a request alone waits for the other, too.
    both = (max(item, host_s), min(item, host_s))
    return BatchTime(fixed, both[0], max_items, rounds, request_bytes, grounds, both[1])


@dataclass(frozen=True, slots=True)
class _Media:
    """Positions of one kind of medium in a request: all of them, and those that attend to each other."""

    positions: float
    segment: float
    window: float | None


def _encoder(
    spec: EncoderSpec,
    tokens: float,
    klass: RequestClass,
    kernels: Kernels,
    max_tokens: int,
    host: Host,
) -> BatchTime:
    media = _media(spec, klass)
    positions = sum(medium.positions for medium in media)
    full = spec.layers if spec.full_attention_layers is None else len(spec.full_attention_layers)

    def layer(requests: float, windowed: bool) -> float:
        rows = requests * positions
        # Products run over all positions at once; attention differs by the kind of medium.
        segments = [
            (m.positions, m.window if windowed and m.window is not None else m.segment)
            for m in media
        ]
        reach = sum(count * min(count, segment) for count, segment in segments) / positions
        return kernels.layer(
            rows,
            reach,
            hidden=spec.hidden,
            inner=spec.intermediate,
            heads=spec.heads,
            head_dim=spec.hidden / spec.heads,
            gated=spec.gated_mlp,
            dtype=spec.dtype,
            qk_norm=spec.qk_norm,
            scaled=spec.layer_scale,
            rotary=spec.kind == "vision" and not spec.positions,
        )

    def seconds(requests: float) -> float:
        total = full * layer(requests, False)
        # The other layers attend inside windows.
        if spec.layers > full:
            total += (spec.layers - full) * layer(requests, True)
        return total + _ends(spec, kernels, requests * positions, requests * tokens)

    max_items = max(1, int(max_tokens // max(1.0, tokens)))
    wide = max(3.0 * spec.intermediate, 4.0 * spec.hidden) / kernels.tp
    row_bytes = (_LIVE_ROWS * spec.hidden + wide) * ACTIVATION_BYTES
    return _line(
        seconds,
        max_items,
        rounds=1,
        request_bytes=positions * row_bytes,
        grounds=f"{kernels.provenance}; host time fitted to one system, low confidence",
        host_s=host.request_s + host.megapixel_s * _megapixels(spec, klass),
    )


def _ends(spec: EncoderSpec, kernels: Kernels, rows: float, tokens: float) -> float:
    """Seconds of the embedding of patches (or of sound) and of the projector."""
    if spec.patch_size is not None:
        pixels = 3.0 * spec.temporal_patch * spec.patch_size**2
        total = kernels.product(rows, spec.hidden, pixels, spec.dtype)
    else:
        total = kernels.product(2.0 * rows, spec.hidden, 3.0 * (spec.mel_bins or 1), spec.dtype)
        total += kernels.product(rows, spec.hidden, 3.0 * spec.hidden, spec.dtype)
    widths = spec.projector or (spec.hidden * spec.merge**2, spec.output_dim)
    for wide, out in itertools.pairwise(widths):
        total += kernels.product(tokens, out, wide, spec.dtype)
    return total


def _media(spec: EncoderSpec, klass: RequestClass) -> list[_Media]:
    found: list[_Media] = []
    if spec.kind == "audio":
        assert klass.audio_s is not None
        rate = spec.tokens_per_second or 25.0
        if spec.max_positions is not None:
            rate = spec.max_positions / _AUDIO_POSITIONS_S
        found.append(_Media(klass.audio_s * rate, rate * _AUDIO_POSITIONS_S, None))
        return found
    assert spec.patch_size is not None
    window = None if spec.window_px is None else float((spec.window_px // spec.patch_size) ** 2)
    tile = 0.0
    if spec.rule == "tiles":
        tile = float(spec.patches_per_tile + spec.class_token)
    if klass.images is not None:
        image = float(spec.image_patches(klass.images.height_px, klass.images.width_px))
        found.append(_Media(klass.images.count * image, tile or image, window))
    if klass.video is not None:
        group = tile or float(spec.image_patches(klass.video.height_px, klass.video.width_px))
        found.append(_Media(video_groups(spec, klass) * group, group, window))
    return found


def _megapixels(spec: EncoderSpec, klass: RequestClass) -> float:
    """Return the megapixels that an encoder's host prepares: one of sounds has none."""
    pixels = 0.0
    if spec.kind != "vision":
        return pixels
    if klass.images is not None:
        pixels += klass.images.count * klass.images.width_px * klass.images.height_px
    if klass.video is not None:
        pixels += klass.video.frames * klass.video.width_px * klass.video.height_px
    return pixels / 1e6


def _text(
    spec: TransformerSpec, klass: RequestClass, kernels: Kernels, max_tokens: int
) -> BatchTime:
    """A transformer that reads the prompt once, as an engine prefills it, without the output matrix."""
    tp = kernels.tp if splits_evenly(spec, kernels.tp) else 1
    model = analytic(spec, kernels.node, tp=tp, engine=kernels.engine, constants=kernels.table)
    spread = 1.0 + klass.input_cv**2

    def seconds(requests: float) -> float:
        batch = Batch.prefill(requests * klass.input_tokens, requests, length_spread=spread)
        parts = model.parts(batch)
        # Nobody asks it for a token: the output matrix is not run.
        head = parts.head
        return float(step_seconds(model, batch, 0, spec.layers) - head)

    max_items = max(1, int(max_tokens // max(1.0, klass.input_tokens)))
    row_bytes = (_LIVE_ROWS * spec.hidden + 3.0 * spec.intermediate / kernels.tp) * ACTIVATION_BYTES
    return _line(
        seconds,
        max_items,
        rounds=1,
        request_bytes=klass.input_tokens * row_bytes,
        grounds=model.provenance,
    )


def _denoise(
    model: ModelSpec, spec: GeneratorSpec, klass: RequestClass, kernels: Kernels
) -> BatchTime:
    """One step of denoising: joint attention over picture and text, products shared or of their own."""
    wanted = klass.image_output
    assert wanted is not None
    hidden, inner, heads = _shape(spec)
    layers = spec.layers or 1
    _, pixels = image_latents(model, klass)
    text = klass.input_tokens * wanted.count
    passes = 2 if wanted.guided else 1

    def seconds(requests: float) -> float:
        # With guidance every picture is computed twice: with the prompt and without.
        images = requests * wanted.count * passes
        streams = [requests * passes * pixels, requests * passes * text]
        # Models with one stream run text and picture through the same products.
        if not spec.dual_stream:
            streams = [sum(streams)]
        total = sum(_block(spec, kernels, rows, images) for rows in streams)
        rows = requests * passes * (pixels + text)
        together = (pixels + text) / wanted.count
        total += kernels.attention(rows, together, heads, spec.head_dim or hidden / heads)
        total += kernels.all_reduces(rows, hidden)
        # Launches take their time, however little there is to compute.
        return layers * max(total, (6.0 + BLOCK_LAUNCHES) * len(streams) * LAUNCH_S)

    rows = passes * (pixels + text)
    row_bytes = (_LIVE_ROWS * hidden + 3.0 * inner / kernels.tp) * ACTIVATION_BYTES
    return _line(
        seconds,
        MAX_IMAGES,
        rounds=wanted.steps,
        request_bytes=rows * row_bytes,
        grounds=kernels.provenance,
    )


def _block(spec: GeneratorSpec, kernels: Kernels, rows: float, sequences: float) -> float:
    """Products and passes of one block over one stream, modulation included, attention left out."""
    hidden, inner, heads = _shape(spec)
    share = math.ceil(heads / kernels.tp) * (spec.head_dim or hidden / heads)
    wide = math.ceil(inner / kernels.tp)
    total = kernels.product(rows, 3.0 * share, hidden, spec.dtype)
    total += kernels.product(rows, hidden, share, spec.dtype)
    total += kernels.product(rows, wide, hidden, spec.dtype)
    total += kernels.product(rows, hidden, wide, spec.dtype)
    # Six vectors that scale, shift and gate: one product for every sequence, and passes that apply them.
    total += kernels.product(sequences, 6.0 * hidden / kernels.tp, hidden, spec.dtype)
    return total + kernels.passes(rows, BLOCK_PASSES * hidden + 2.0 * wide, BLOCK_LAUNCHES)


def _shape(spec: GeneratorSpec) -> tuple[int, int, int]:
    """Hidden size, MLP width and heads."""
    if spec.hidden is None or spec.heads is None:
        raise InputError("a generator's hidden size or heads are not public", field="model")
    return spec.hidden, spec.intermediate or 4 * spec.hidden, spec.heads


def _speech(spec: GeneratorSpec, klass: RequestClass, kernels: Kernels) -> BatchTime:
    """Speech from codes: steps over spectrogram frames (or one pass over codes), then convolutions."""
    assert klass.speech_s is not None
    hidden, inner, heads = _shape(spec)
    frames = speech_codes(spec, klass)
    layers, times = spec.layers or 1, (spec.steps or 1) * (spec.passes or 1)
    denoises = spec.kind == "diffusion"

    def seconds(requests: float) -> float:
        rows = requests * frames
        if denoises:
            layer = _block(spec, kernels, rows, requests)
            layer += kernels.attention(rows, frames, heads, spec.head_dim or hidden / heads)
        else:
            layer = kernels.layer(
                rows,
                frames,
                hidden=hidden,
                inner=inner,
                heads=heads,
                head_dim=spec.head_dim or hidden / heads,
                gated=True,
                dtype=spec.dtype,
            )
        flops = requests * (klass.speech_s or 0.0) * (spec.conv_flops or 0.0)
        launched = (6.0 + BLOCK_LAUNCHES) * LAUNCH_S if denoises else 0.0
        return times * layers * max(layer, launched) + kernels.convolutions(flops)

    row_bytes = (_LIVE_ROWS * hidden + 3.0 * inner / kernels.tp) * ACTIVATION_BYTES
    grounds = "shapes from public configurations, convolutions counted; " + kernels.provenance
    return _line(
        seconds,
        MAX_SPEECH,
        rounds=1,
        request_bytes=frames * row_bytes,
        grounds=grounds,
    )


def _pixels(spec: GeneratorSpec, klass: RequestClass, kernels: Kernels) -> BatchTime:
    """Latents to pixels, by convolutions."""
    wanted = klass.image_output
    assert wanted is not None
    if spec.conv_flops is None:
        raise InputError(
            "the operations per pixel of a decoder are not known",
            field="model",
            hint="give a measured rate for it",
        )
    pixels = wanted.count * wanted.width_px * wanted.height_px
    flops = pixels * spec.conv_flops
    return _line(
        lambda requests: kernels.convolutions(requests * flops) + DECODER_S,
        MAX_IMAGES,
        rounds=1,
        request_bytes=pixels * _PIXEL_BYTES,
        grounds="convolutions counted from shapes, at an assumed share of the rate of products",
    )
