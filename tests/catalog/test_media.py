from __future__ import annotations

import pytest

from atoll.catalog.catalog import Catalog
from atoll.catalog.media import EncoderSpec
from atoll.core.errors import InputError


def encoder(model: str, part: str) -> EncoderSpec:
    spec = Catalog.default().model(model).components[part]
    assert isinstance(spec, EncoderSpec)
    return spec


@pytest.mark.parametrize(
    ("height", "width", "tokens"),
    [(28, 28, 1), (29, 28, 2), (1080, 1920, 39 * 69), (448, 448, 256)],
)
def test_grid_tokens(height: int, width: int, tokens: int) -> None:
    vision = encoder("qwen2.5-vl-7b", "vision")
    assert vision.image_tokens(height, width) == tokens
    assert vision.image_patches(height, width) == 4 * tokens


@pytest.mark.parametrize(
    ("height", "width", "tiles"),
    [(448, 448, 1), (100, 100, 1), (448, 896, 2 + 1), (896, 896, 4 + 1), (448, 448 * 12, 12 + 1)],
)
def test_tile_tokens(height: int, width: int, tiles: int) -> None:
    vision = encoder("internvl3-38b", "vision")
    assert vision.image_tokens(height, width) == 256 * tiles
    assert vision.image_patches(height, width) == 1025 * tiles


def test_audio_tokens() -> None:
    assert encoder("qwen2.5-omni-7b", "audio").audio_tokens(30) == 750
    assert encoder("qwen3-omni-30b", "audio").audio_tokens(10.01) == 126


def test_wrong_kind_of_input() -> None:
    with pytest.raises(InputError, match="takes no images"):
        encoder("qwen2.5-omni-7b", "audio").image_tokens(10, 10)
    with pytest.raises(InputError, match="no known audio rate"):
        encoder("qwen2.5-omni-7b", "vision").audio_tokens(1)
    with pytest.raises(InputError, match="pixels"):
        encoder("qwen2.5-vl-7b", "vision").image_tokens(0, 10)


def test_unknown_parts_of_a_shape_make_the_total_unknown() -> None:
    vision = encoder("qwen3-omni-30b", "vision")
    assert vision.total_params is None
    assert vision.weight_bytes is None
    assert vision.unknown == ("projector", "total_params")
    assert vision.layers_weight_bytes == 27 * vision.layer_params * 2
    assert encoder("qwen2.5-vl-7b", "vision").unknown == ()
