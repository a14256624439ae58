"""Encoders and generators of any-to-any models, as far as their shapes are public.

A field that no public source states is None, and so is every count that would need it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from atoll.catalog.transformer import BF16, DType, MoeSpec
from atoll.core.errors import InputError

EncoderKind = Literal["vision", "audio"]
EncoderRule = Literal["grid", "tiles", "seconds"]
GeneratorKind = Literal["autoregressive", "diffusion", "vocoder", "vae"]


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """A transformer that turns an image or a sound into tokens for an llm.

    `rule` says how many tokens that makes: `grid`, one per square of `patch_size * merge` pixels,
    rounded up; `tiles`, a fixed number per square tile of `image_size` pixels and one thumbnail;
    `seconds`, `tokens_per_second`. Layers outside `full_attention_layers` (None: there are none
    outside) attend within `window_px` pixels. `projector` lists the widths on the way into the llm.
    """

    kind: EncoderKind
    layers: int
    hidden: int
    intermediate: int
    heads: int
    output_dim: int
    rule: EncoderRule
    gated_mlp: bool = False
    qkv_bias: bool = True
    key_bias: bool = True
    qk_norm: bool = False
    layer_scale: bool = False
    norm_bias: bool = False
    mlp_bias: bool = True
    patch_size: int | None = None
    temporal_patch: int = 1
    merge: int = 1
    patch_bias: bool = False
    positions: int = 0
    class_token: bool = False
    image_size: int | None = None
    max_tiles: int | None = None
    window_px: int | None = None
    full_attention_layers: tuple[int, ...] | None = None
    mel_bins: int | None = None
    max_positions: int | None = None
    tokens_per_second: float | None = None
    projector: tuple[int, ...] | None = None
    projector_norm: int = 0
    extra_params: int | None = 0
    dtype: DType = BF16

    @property
    def unknown(self) -> tuple[str, ...]:
        """Fields this encoder has that no public source states."""
        names = ("projector",) if self.projector is None else ()
        return (*names, "total_params") if self.total_params is None else names

    @property
    def layer_params(self) -> int:
        """Parameters of one layer."""
        h, f = self.hidden, self.intermediate
        ups = 2 if self.gated_mlp else 1
        attention = 4 * h * h + h + (3 * h if self.qkv_bias else 0)
        attention -= h if self.qkv_bias and not self.key_bias else 0
        mlp = (ups + 1) * h * f + (ups * f + h if self.mlp_bias else 0)
        norms = 2 * h * (2 if self.norm_bias else 1)
        return (
            attention
            + mlp
            + norms
            + (2 * h if self.qk_norm else 0)
            + (2 * h if self.layer_scale else 0)
        )

    @property
    def projector_params(self) -> int | None:
        """Parameters of the layers leading into the llm, None where their widths are not public."""
        if self.projector is None:
            return None
        pairs = zip(self.projector, self.projector[1:], strict=False)
        return self.projector_norm + sum(wide * out + out for wide, out in pairs)

    @property
    def stem_params(self) -> int:
        """Parameters before the first layer: convolutions, learned positions, class token."""
        h = self.hidden
        if self.patch_size is not None:
            pixels = 3 * self.temporal_patch * self.patch_size**2
            patch = pixels * h + (h if self.patch_bias else 0)
            return patch + self.positions * h + (h if self.class_token else 0)
        # Whisper's two convolutions of width 3.
        return 3 * (self.mel_bins or 0) * h + h + 3 * h * h + h

    @property
    def total_params(self) -> int | None:
        """All parameters, None where a part of the shape is not public."""
        projector = self.projector_params
        if projector is None or self.extra_params is None:
            return None
        return self.stem_params + self.layers * self.layer_params + projector + self.extra_params

    @property
    def weight_bytes(self) -> float | None:
        """Bytes of all weights, None where a part of the shape is not public."""
        params = self.total_params
        return None if params is None else params * self.dtype.bytes_per_weight

    @property
    def layers_weight_bytes(self) -> float:
        """Bytes of the transformer layers alone; a lower bound on `weight_bytes`."""
        return self.layers * self.layer_params * self.dtype.bytes_per_weight

    def image_tokens(self, height_px: int, width_px: int) -> int:
        """Tokens the llm sees for one image of that size."""
        if height_px < 1 or width_px < 1:
            raise InputError(f"an image of {height_px} x {width_px} pixels", field="image size")
        if self.rule == "grid" and self.patch_size is not None:
            side = self.patch_size * self.merge
            return math.ceil(height_px / side) * math.ceil(width_px / side)
        if self.rule == "tiles":
            per_tile = self.patches_per_tile // self.merge**2
            return self._tiles(height_px, width_px) * per_tile
        raise InputError(f"a {self.kind} encoder takes no images", field="image size")

    def image_patches(self, height_px: int, width_px: int) -> int:
        """Positions the encoder itself processes for one image of that size."""
        tokens = self.image_tokens(height_px, width_px) * self.merge**2
        if self.rule == "tiles" and self.class_token:
            tokens += self._tiles(height_px, width_px)
        return tokens

    def audio_tokens(self, duration_s: float) -> int:
        """Tokens the llm sees for a sound of that many seconds."""
        if self.tokens_per_second is None:
            raise InputError(f"a {self.kind} encoder has no known audio rate", field="duration")
        return math.ceil(duration_s * self.tokens_per_second)

    @property
    def patches_per_tile(self) -> int:
        """Patches of one square tile, class token left out."""
        assert self.image_size is not None
        assert self.patch_size is not None
        return (self.image_size // self.patch_size) ** 2

    def _tiles(self, height_px: int, width_px: int) -> int:
        """Tiles of the grid whose shape is nearest the image's, and a thumbnail if more than one.

        Among grids equally near, the larger is taken when the image covers more than half of it
        (InternVL's dynamic tiling).
        """
        assert self.max_tiles is not None
        assert self.image_size is not None
        max_tiles = self.max_tiles
        grids = sorted(
            {
                (w, h)
                for w in range(1, max_tiles + 1)
                for h in range(1, max_tiles + 1)
                if w * h <= max_tiles
            },
            key=lambda grid: grid[0] * grid[1],
        )
        aspect, area = width_px / height_px, width_px * height_px
        best, nearest = (1, 1), math.inf
        for wide, high in grids:
            distance = abs(aspect - wide / high)
            covers = area > 0.5 * self.image_size**2 * wide * high
            if distance < nearest or (distance == nearest and covers):
                best, nearest = (wide, high), distance
        tiles = best[0] * best[1]
        return tiles + 1 if tiles > 1 else 1


@dataclass(frozen=True, slots=True)
class GeneratorSpec:
    """A component that turns an llm's output into sound or pictures; unknown fields are None.

    `params` is the published count of parameters, where there is one. `frames_per_second` are codes (of an
    autoregressive one) or spectrogram frames for a second of speech. `steps` of denoising take `passes`
    through the layers each, where requests do not say how many. `dual_stream` has weights of its own for
    text beside those for the picture. `conv_flops` are operations of convolutions for a pixel, or for a
    second of speech. A frame's further codebooks, where there are any, come from `predictor_layers`, run
    once for each. A vocoder that speaks what an llm writes may do so `by_sentence`: it begins with the first.
    """

    kind: GeneratorKind
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate: int | None = None
    vocab: int | None = None
    max_context: int | None = None
    context_dim: int | None = None
    in_channels: int | None = None
    out_channels: int | None = None
    patch_size: int | None = None
    codebooks: int | None = None
    codebook_size: int | None = None
    frames_per_second: float | None = None
    by_sentence: bool = False
    steps: int | None = None
    passes: int | None = None
    dual_stream: bool = False
    conv_flops: float | None = None
    predictor_layers: int | None = None
    predictor_intermediate: int | None = None
    predictor_kv_heads: int | None = None
    moe: MoeSpec | None = None
    params: int | None = None
    dtype: DType = BF16

    @property
    def unknown(self) -> tuple[str, ...]:
        """Fields a generator of this kind has that no public source states."""
        expected = ["layers", "hidden", "params"]
        if self.kind in ("autoregressive", "diffusion"):
            expected += ["heads", "head_dim", "intermediate"]
        if self.kind == "autoregressive":
            expected += ["kv_heads", "vocab", "max_context"]
        return tuple(name for name in expected if getattr(self, name) is None)

    @property
    def weight_bytes(self) -> float | None:
        """Bytes of all weights, None where the number of parameters is not public."""
        return None if self.params is None else self.params * self.dtype.bytes_per_weight
