"""Components as torch modules, from their shapes in the catalog: encoders, denoisers, vocoders.

Weights are random and nothing but speed is right about them. Layers are written as plain modules, which is
how most engines run such parts: attention by `scaled_dot_product_attention`, everything else an operator
each. Activations are (items, positions, hidden). Loads torch, so import it where it is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.catalog.media import EncoderSpec

Segments = tuple[tuple[int, int], ...]
"""How the positions of an item fall into groups that attend to each other: (groups, positions of each)."""
CONV_CHANNELS = 256
CONV_WIDTH = 7
CONV_LAYERS = 4
"""Convolutions that stand in for those of a vocoder, whose shapes the catalog does not have."""
CONV_FLOPS = 2.0 * CONV_CHANNELS**2 * CONV_WIDTH * CONV_LAYERS
"""Operations of the stand-in for a position."""


def segments_of(positions: int, length: int) -> Segments:
    """Return positions cut into segments of `length`, and what is left over."""
    length = max(1, min(length, positions))
    whole, left = divmod(positions, length)
    found = ((whole, length),) if whole else ()
    return (*found, (1, left)) if left else found


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """Attention of (items, positions, heads, width) within segments, heads joined in the result."""
    parts, start = [], 0
    for groups, length in segments:
        end = start + groups * length
        cut = (
            x[:, start:end].unflatten(1, (groups, length)).flatten(0, 1).transpose(1, 2)
            for x in (q, k, v)
        )
        out = functional.scaled_dot_product_attention(*cut).transpose(1, 2)
        parts.append(out.unflatten(0, (-1, groups)).flatten(1, 2).flatten(2))
        start = end
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _norm(width: int, bias: bool) -> nn.Module:
    return nn.LayerNorm(width) if bias else nn.RMSNorm(width, eps=1e-6)


class Mlp(nn.Module):
    """Two products with a GELU between, or three with a gate."""

    def __init__(self, hidden: int, inner: int, *, gated: bool, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner, bias=bias)
        self.gate = nn.Linear(hidden, inner, bias=bias) if gated else None
        self.down = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return as wide a tensor as came."""
        if self.gate is None:
            return self.down(functional.gelu(self.up(x)))  # type: ignore[no-any-return]
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions on (items, positions, heads, width), as a complex product in fp32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[:, None]).flatten(3).type_as(x)


class EncoderLayer(nn.Module):
    """A layer of an encoder: attention within segments, then an MLP, each on the normed input.

    With `rotary`, queries and keys are turned by their positions, as many as there are in `segments`.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        heads: int,
        segments: Segments,
        *,
        head_dim: int | None = None,
        gated: bool = False,
        norm_bias: bool = False,
        qkv_bias: bool = True,
        mlp_bias: bool = True,
        qk_norm: bool = False,
        scaled: bool = False,
        rotary: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.segments = heads, segments
        width = head_dim or hidden // heads
        wide = heads * width
        positions = sum(groups * length for groups, length in segments)
        turns = torch.ones(positions, width // 2, dtype=torch.complex64) if rotary else None
        self.turns: Tensor | None
        self.register_buffer("turns", turns, persistent=False)
        self.norm1, self.norm2 = _norm(hidden, norm_bias), _norm(hidden, norm_bias)
        self.qkv, self.out = nn.Linear(hidden, 3 * wide, bias=qkv_bias), nn.Linear(wide, hidden)
        self.q_norm, self.k_norm = (_norm(wide, False) if qk_norm else None for _ in "qk")
        self.mlp = Mlp(hidden, inner, gated=gated, bias=mlp_bias)
        ones = [nn.Parameter(torch.ones(hidden)) if scaled else None for _ in "12"]
        self.scale1, self.scale2 = ones

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer makes of (items, positions, hidden)."""
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in (q, k, v))
        if self.turns is not None:
            q, k = rotate(q, self.turns), rotate(k, self.turns)
        y = self.out(attend(q, k, v, self.segments))
        x = x + (y if self.scale1 is None else y * self.scale1)
        y = self.mlp(self.norm2(x))
        return x + (y if self.scale2 is None else y * self.scale2)  # type: ignore[no-any-return]


class EncoderStem(nn.Module):
    """Patches of pixels, or frames of a spectrogram, to positions."""

    def __init__(self, spec: EncoderSpec, positions: int, class_tokens: int) -> None:
        super().__init__()
        self.class_tokens, self.is_audio = class_tokens, spec.patch_size is None
        if spec.patch_size is not None:
            pixels = 3 * spec.temporal_patch * spec.patch_size**2
            self.patch = nn.Linear(pixels, spec.hidden, bias=spec.patch_bias)
        else:
            self.conv1 = nn.Conv1d(spec.mel_bins or 1, spec.hidden, 3, padding=1)
            self.conv2 = nn.Conv1d(spec.hidden, spec.hidden, 3, stride=2, padding=1)
        self.first = nn.Parameter(torch.zeros(1, max(1, class_tokens), spec.hidden))
        self.table = nn.Parameter(torch.zeros(positions, spec.hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Return (items, positions, hidden)."""
        if self.is_audio:
            x = functional.gelu(self.conv2(functional.gelu(self.conv1(x)))).transpose(1, 2)
        else:
            x = self.patch(x)
        if self.class_tokens:
            x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], dim=1)
        return x + self.table


class EncoderTail(nn.Module):
    """The last norm, neighbours merged, and the projector: (items, tokens, width of the llm)."""

    def __init__(self, spec: EncoderSpec, tokens: int) -> None:
        super().__init__()
        self.norm, self.merge, self.tokens = _norm(spec.hidden, spec.norm_bias), spec.merge, tokens
        widths = spec.projector or (spec.hidden * spec.merge**2, spec.output_dim)
        self.products = nn.ModuleList(nn.Linear(wide, out) for wide, out in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the llm reads."""
        # Class tokens, and positions that pooling would take out, are left behind.
        x = self.norm(x)[:, -self.tokens * self.merge**2 :]
        x = x.reshape(x.shape[0], self.tokens, -1)
        for number, product in enumerate(self.products):
            x = product(functional.gelu(x) if number else x)
        return x


class DenoiserStream(nn.Module):
    """One stream of a denoising block: everything but the attention, modulated by the step."""

    def __init__(self, hidden: int, inner: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 6 * hidden))
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, elementwise_affine=False) for _ in "12")
        self.qkv = nn.Linear(hidden, 3 * heads * head_dim)
        self.q_norm, self.k_norm = (nn.RMSNorm(head_dim, eps=1e-6) for _ in "qk")
        self.out = nn.Linear(heads * head_dim, hidden)
        self.mlp = Mlp(hidden, inner, gated=False)

    def vectors(self, step: Tensor) -> Sequence[Tensor]:
        """Return shift, scale and gate of attention, then of the MLP, each (items, 1, hidden)."""
        return self.modulation(step).unsqueeze(1).chunk(6, dim=-1)  # type: ignore[no-any-return]

    def project(self, x: Tensor, vectors: Sequence[Tensor], turns: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values, each (items, positions, heads, width)."""
        y = self.qkv(self.norm1(x) * (1 + vectors[1]) + vectors[0])
        q, k, v = (z.unflatten(-1, (self.heads, -1)) for z in y.chunk(3, dim=-1))
        return rotate(self.q_norm(q), turns), rotate(self.k_norm(k), turns), v

    def finish(self, x: Tensor, attended: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """Return the stream with attention's result and the MLP added through their gates."""
        x = x + vectors[2] * self.out(attended)
        y = self.mlp(self.norm2(x) * (1 + vectors[4]) + vectors[3])
        return x + vectors[5] * y  # type: ignore[no-any-return]


class Denoising(NamedTuple):
    """Data that goes from block to block.

    Streams of (items, positions, hidden), the step as (items, hidden), and by stream the rotation of every
    position.
    """

    streams: tuple[Tensor, ...]
    step: Tensor
    turns: tuple[Tensor, ...]


class VocoderBlock(nn.Module):
    """A block of a denoiser: streams with weights of their own, and one attention over all of them."""

    def __init__(self, hidden: int, inner: int, heads: int, head_dim: int, streams: int) -> None:
        super().__init__()
        self.streams = nn.ModuleList(
            DenoiserStream(hidden, inner, heads, head_dim) for _ in range(streams)
        )

    def forward(self, given: Denoising) -> Denoising:
        """Return what the block makes of the streams."""
        own = [stream for stream in self.streams if isinstance(stream, DenoiserStream)]
        vectors = [stream.vectors(given.step) for stream in own]
        each = zip(own, given.streams, vectors, given.turns, strict=True)
        projected = [stream.project(x, some, turns) for stream, x, some, turns in each]
        q, k, v = (
            same[0] if len(same) == 1 else torch.cat(same, dim=1)
            for same in zip(*projected, strict=True)
        )
        lengths = [x.shape[1] for x in given.streams]
        attended = attend(q, k, v, ((1, sum(lengths)),)).split(lengths, dim=1)
        after = zip(own, given.streams, attended, vectors, strict=True)
        return Denoising(
            tuple(stream.finish(x, some, vector) for stream, x, some, vector in after),
            given.step,
            given.turns,
        )


class StandInConvolutions(nn.Module):
    """Convolutions with as many operations as a vocoder's; input (items, channels, positions)."""

    def __init__(self) -> None:
        super().__init__()
        same = CONV_WIDTH // 2
        self.layers = nn.Sequential(
            *(
                nn.Conv1d(CONV_CHANNELS, CONV_CHANNELS, CONV_WIDTH, padding=same)
                for _ in range(CONV_LAYERS)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return as much as came."""
        return self.layers(x)  # type: ignore[no-any-return]


def conv_positions(flops: float) -> int:
    """Return over how many positions the stand-in takes so many operations."""
    return max(1, math.ceil(flops / CONV_FLOPS))


def fill(module: nn.Module) -> nn.Module:
    """Give a module random weights that keep the size of activations, and return it."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return module.eval()
