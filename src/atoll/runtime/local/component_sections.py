"""Components as sections that are timed: modules of `component_modules`, and how often their time counts.

Counts of positions and tokens are those of the performance model (`perf.components`). Loads torch, so import
it where it is needed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from atoll.catalog.media import EncoderSpec, GeneratorSpec
from atoll.catalog.models import ModelSpec
from atoll.core.errors import InputError
from atoll.perf.components.class_loads import image_latents
from atoll.perf.components.measured import Unit
from atoll.runtime.local.component_modules import (
    CONV_CHANNELS,
    CONV_FLOPS,
    CONV_LAYERS,
    CONV_WIDTH,
    Denoising,
    EncoderLayer,
    EncoderStem,
    EncoderTail,
    Segments,
    StandInConvolutions,
    VocoderBlock,
    conv_positions,
    fill,
    segments_of,
)
from atoll.workload.classes import ImageOutput, RequestClass

_AUDIO_WINDOW_S = 30.0
_MAX_MEMORY_SHARE = 0.8
"""Share of the memory that is free which weights and activations may take."""
_ALIVE = {"encoder": 8.0, "block": 16.0}
"""Activations alive at once for a position, in hidden sizes, beside those of the MLP; generous."""


@dataclass(frozen=True, slots=True)
class ItemOptions:
    """One item: an image of so many pixels, or so many seconds of sound or speech.

    For pictures that are made: `steps` of denoising, tokens of the prompt, and whether each step is run
    twice, with the prompt and without. None takes the component's own.
    """

    width_px: int | None = None
    height_px: int | None = None
    seconds: float = 10.0
    text_tokens: int = 300
    steps: int | None = None
    guided: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """Modules that are timed together, what they are given for a batch, and how often their time counts.

    `weights` is how many they have. Until it is placed on a device, `module` is what makes it.
    """

    module: Callable[..., Any]
    inputs: Callable[[int], Any]
    times: float
    weights: float


@dataclass(frozen=True, slots=True)
class Piece:
    """An item of a component: in words, its unit and how much of it, the sections, and notes.

    `activations` is how many of an item are alive at once, about.
    """

    item: str
    unit: Unit
    amount: float
    sections: tuple[Section, ...]
    activations: float
    notes: tuple[str, ...] = ()


class ComponentBuilder:
    """Turns the shapes of a component into sections on a device, with room for `largest` items at a time."""

    def __init__(
        self,
        model: ModelSpec,
        spec: EncoderSpec | GeneratorSpec,
        item: ItemOptions,
        shrink: int,
        device: torch.device,
        dtype: torch.dtype,
        largest: int = 1,
    ) -> None:
        self.model, self.spec, self.item = model, spec, item
        self.shrink, self.device, self.dtype = shrink, device, dtype
        self.largest = largest

    def build(self, part: str) -> Piece:
        """Return the component as what is run for an item of it."""
        spec = self.spec
        if isinstance(spec, EncoderSpec):
            found = self._sound(spec) if spec.kind == "audio" else self._image(spec)
        elif spec.frames_per_second is not None:
            found = self._speech(spec)
        else:
            found = self._picture(spec)
        self._fits(part, found)
        built = tuple(
            Section(self._place(s.module), s.inputs, s.times, s.weights) for s in found.sections
        )
        return replace(found, sections=built)

    def _place(self, make: Callable[[], nn.Module]) -> nn.Module:
        usual = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device(self.device):
                return fill(make())
        finally:
            torch.set_default_dtype(usual)

    def _fits(self, part: str, piece: Piece) -> None:
        """Refuse what the machine has no room for before any of it is made."""
        if self.device.type == "cuda":
            free = float(torch.cuda.mem_get_info(self.device)[0])
        else:
            free = float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        weights = sum(s.weights for s in piece.sections) * self.dtype.itemsize
        if weights > _MAX_MEMORY_SHARE * free:
            more = self.shrink * math.ceil(weights / (_MAX_MEMORY_SHARE * max(1.0, free)))
            raise InputError(
                f"weights of {part} take {weights / 1e9:.1f} GB, {free / 1e9:.1f} GB are free",
                field="--shrink",
                hint=f"build fewer layers with --shrink {more}",
            )
        batch = self.largest * piece.activations * self.dtype.itemsize
        if weights + batch > _MAX_MEMORY_SHARE * free:
            raise InputError(
                f"a batch of {self.largest} takes {batch / 1e9:.1f} GB beside weights of "
                f"{weights / 1e9:.1f}, {free / 1e9:.1f} GB are free",
                field="--batch",
                hint="use smaller batches or items",
            )

    def _random(self, *shape: int) -> Any:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def _size(self, width: int, height: int) -> tuple[int, int]:
        return self.item.width_px or width, self.item.height_px or height

    def _image(self, spec: EncoderSpec) -> Piece:
        width, height = self._size(1280, 720)
        tokens, positions = spec.image_tokens(height, width), spec.image_patches(height, width)

        tile = positions
        if spec.rule == "tiles":
            tile = spec.patches_per_tile + spec.class_token
        full = segments_of(positions, tile)
        windowed = full
        if spec.window_px is not None and spec.patch_size is not None:
            windowed = segments_of(positions, (spec.window_px // spec.patch_size) ** 2)
        extra = positions - tokens * spec.merge**2
        word = f"image of {width} x {height} pixels, {positions} positions"
        return self._encoder(spec, word, "image", 1.0, tokens, positions, extra, (full, windowed))

    def _sound(self, spec: EncoderSpec) -> Piece:
        seconds = self.item.seconds
        rate = spec.tokens_per_second or 1.0
        if spec.max_positions is not None:
            rate = spec.max_positions / _AUDIO_WINDOW_S
        positions = max(1, round(seconds * rate))
        tokens = min(positions, spec.audio_tokens(seconds))

        cut = segments_of(positions, max(1, round(rate * _AUDIO_WINDOW_S)))
        word = f"sound of {seconds:g} s, {positions} positions"
        return self._encoder(spec, word, "audio_s", seconds, tokens, positions, 0, (cut, cut))

    def _encoder(
        self,
        spec: EncoderSpec,
        word: str,
        unit: Unit,
        amount: float,
        tokens: int,
        positions: int,
        class_tokens: int,
        segments: tuple[Segments, Segments],
    ) -> Piece:
        every = range(spec.layers)
        whole = every if spec.full_attention_layers is None else spec.full_attention_layers
        kinds = [0 if layer in whole else 1 for layer in every]

        def layer(kind: int) -> nn.Module:
            return EncoderLayer(
                spec.hidden,
                spec.intermediate,
                spec.heads,
                segments[kind],
                gated=spec.gated_mlp,
                norm_bias=spec.norm_bias,
                qkv_bias=spec.qkv_bias,
                mlp_bias=spec.mlp_bias,
                qk_norm=spec.qk_norm,
                scaled=spec.layer_scale,
                # Encoders of images that learn no positions turn queries and keys by them.
                rotary=spec.kind == "vision" and not spec.positions,
            )

        def stem() -> EncoderStem:
            return EncoderStem(spec, positions, class_tokens)

        inputs = stem_inputs(spec, positions, class_tokens)
        projector = spec.projector_params or spec.hidden * spec.merge**2 * spec.output_dim
        ends = float(spec.stem_params + positions * spec.hidden + projector)

        def bring(batch: int) -> Any:
            return self._random(batch, *inputs)

        def activations(batch: int) -> Any:
            return self._random(batch, positions, spec.hidden)

        notes: tuple[str, ...] = ()
        if spec.projector is None:
            notes = ("the projector's widths are not public: taken to be one matrix",)
        if self.shrink == 1:
            sections = [
                Section(
                    lambda: nn.Sequential(stem(), *map(layer, kinds), EncoderTail(spec, tokens)),
                    bring,
                    1.0,
                    ends + spec.layers * spec.layer_params,
                )
            ]
        else:
            sections = [
                Section(lambda: nn.Sequential(stem(), EncoderTail(spec, tokens)), bring, 1.0, ends)
            ]
            for kind in sorted(set(kinds)):
                sections.append(
                    self._some(
                        partial(layer, kind),
                        kinds.count(kind),
                        activations,
                        1.0,
                        float(spec.layer_params),
                    )
                )
        alive = positions * (_ALIVE["encoder"] * spec.hidden + 3.0 * spec.intermediate)
        return Piece(word, unit, amount, tuple(sections), alive, notes)

    def _some(
        self,
        make: Callable[[], Any],
        total: int,
        inputs: Callable[[int], Any],
        times: float,
        weights: float,
    ) -> Section:
        """A section of equal layers: as many as `shrink` leaves, counting for all."""
        run = math.ceil(total / self.shrink)
        return Section(
            lambda: nn.Sequential(*(make() for _ in range(run))),
            inputs,
            times * total / run,
            run * weights,
        )

    def _shape(self, spec: GeneratorSpec) -> tuple[int, int, int, int, int]:
        """Layers, hidden size, MLP width, heads and their width."""
        assert spec.layers is not None
        assert spec.hidden is not None
        assert spec.heads is not None
        width = spec.head_dim or spec.hidden // spec.heads
        return spec.layers, spec.hidden, spec.intermediate or 4 * spec.hidden, spec.heads, width

    def _blocks(
        self, spec: GeneratorSpec, lengths: Sequence[int], copies: int, times: float
    ) -> Section:
        """All blocks of a denoiser, `copies` sequences for an item, run `times` over."""
        layers, hidden, inner, heads, width = self._shape(spec)

        def inputs(batch: int) -> Denoising:
            items = batch * copies
            return Denoising(
                tuple(self._random(items, length, hidden) for length in lengths),
                self._random(items, hidden),
                tuple(
                    torch.ones(length, width // 2, dtype=torch.complex64, device=self.device)
                    for length in lengths
                ),
            )

        streams = len(lengths)
        weights = streams * (10.0 * hidden**2 + 2.0 * hidden * inner)
        return self._some(
            lambda: VocoderBlock(hidden, inner, heads, width, streams),
            layers,
            inputs,
            times,
            weights,
        )

    def _picture(self, spec: GeneratorSpec) -> Piece:
        width, height = self._size(1024, 1024)
        steps = self.item.steps or spec.steps or ImageOutput().steps
        wanted = ImageOutput(width_px=width, height_px=height, steps=steps)
        text = self.item.text_tokens
        klass = RequestClass(
            name="text -> image", share=1.0, input_tokens=text, image_output=wanted
        )
        tokens = int(image_latents(self.model, klass)[1])
        lengths = (text, tokens) if spec.dual_stream else (text + tokens,)
        copies = 2 if self.item.guided else 1
        guided = ", each with the prompt and without" if self.item.guided else ""
        _, hidden, inner, _, _ = self._shape(spec)
        return Piece(
            f"picture of {width} x {height} pixels, {tokens} positions and {text} of text, "
            f"{steps} steps{guided}",
            "image",
            1.0,
            (self._blocks(spec, lengths, copies, float(steps)),),
            copies * sum(lengths) * (_ALIVE["block"] * hidden + 2.0 * inner),
            (f"one step was run and counts {steps} times; what decodes pictures is not in it",),
        )

    def _speech(self, spec: GeneratorSpec) -> Piece:
        seconds = self.item.seconds
        frames = max(1, round(seconds * (spec.frames_per_second or 1.0)))
        layers, hidden, inner, heads, width = self._shape(spec)
        times = float((self.item.steps or spec.steps or 1) * (spec.passes or 1))
        notes: tuple[str, ...] = ()
        if spec.kind == "diffusion":
            section = self._blocks(spec, (frames,), 1, times)
            notes = (f"one pass was run and counts {times:g} times",)
        else:
            section = self._some(
                lambda: EncoderLayer(
                    hidden,
                    inner,
                    heads,
                    segments_of(frames, frames),
                    head_dim=width,
                    gated=True,
                    rotary=True,
                ),
                layers,
                lambda batch: self._random(batch, frames, hidden),
                times,
                4.0 * hidden * heads * width + 3.0 * hidden * inner,
            )
        sections = [section]
        alive = frames * (_ALIVE["block"] * hidden + 3.0 * inner)
        if spec.conv_flops:
            flops = spec.conv_flops * seconds
            sections.append(self._convolutions(flops))
            # Sections run one after the other: the larger of the two counts.
            alive = max(alive, 3.0 * CONV_CHANNELS * conv_positions(flops / self.shrink))
            notes += ("its convolutions are stand-ins with as many operations",)
        else:
            notes += ("the operations of its convolutions are not public: left out",)
        word = f"speech of {seconds:g} s, {frames} frames"
        return Piece(word, "speech_s", seconds, tuple(sections), alive, notes)

    def _convolutions(self, flops: float) -> Section:
        positions = conv_positions(flops / self.shrink)
        return Section(
            StandInConvolutions,
            lambda batch: self._random(batch, CONV_CHANNELS, positions),
            flops / (CONV_FLOPS * positions),
            float(CONV_LAYERS * CONV_WIDTH * CONV_CHANNELS**2),
        )


def stem_inputs(spec: EncoderSpec, positions: int, class_tokens: int) -> tuple[int, ...]:
    """Return the shape of what one item brings to an encoder: patches of pixels, or a spectrogram."""
    if spec.patch_size is None:
        return spec.mel_bins or 1, 2 * positions
    return positions - class_tokens, 3 * spec.temporal_patch * spec.patch_size**2
