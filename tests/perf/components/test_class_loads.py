"""Which parts a class needs, how many tokens they see, how many bytes go between."""

from __future__ import annotations

import pytest

from atoll.core.errors import InputError
from atoll.perf.components.class_loads import (
    bytes_between,
    class_routes,
    image_latents,
    llm_lengths,
    talker_lengths,
)
from atoll.workload.classes import Images, RequestClass, Video
from tests.perf.components.builders import AUDIO, IMAGE, PICTURE, SPEECH, TEXT, VIDEO, model


def test_ways_with_and_without_phases_apart() -> None:
    omni = model("qwen2.5-omni-7b")
    assert class_routes(omni, TEXT) == (("llm",), ("llm.prefill", "llm.decode"))
    assert class_routes(omni, IMAGE)[0] == ("vision", "llm")
    both = RequestClass(
        name="image+audio -> audio", share=1.0, images=Images(), audio_s=3.0, speech_s=5.0
    )
    assert class_routes(omni, both) == (
        ("vision", "audio", "llm", "talker", "vocoder"),
        ("vision", "audio", "llm.prefill", "llm.decode", "talker", "vocoder"),
    )


def test_a_model_without_an_llm_has_one_way() -> None:
    assert class_routes(model("qwen-image"), PICTURE) == (("text", "dit", "vae"),)


def test_the_second_talker_family() -> None:
    parts = class_routes(model("qwen3-omni-30b"), SPEECH)[0]
    assert parts == ("llm", "talker", "code2wav")


@pytest.mark.parametrize(
    ("name", "klass", "field", "message"),
    [
        ("qwen3-32b", IMAGE, "images", "looks at no images"),
        ("qwen3-32b", VIDEO, "video", "looks at no images"),
        ("qwen2.5-vl-7b", AUDIO, "audio_s", "hears no audio"),
        ("qwen2.5-vl-7b", SPEECH, "speech_s", "does not speak"),
        ("qwen2.5-vl-7b", PICTURE, "image_output", "makes no images"),
        ("qwen-image", TEXT, "classes", "writes no text"),
    ],
)
def test_what_a_model_cannot_do(name: str, klass: RequestClass, field: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        class_routes(model(name), klass)
    assert caught.value.field == field
    assert caught.value.hint


def test_tokens_of_media_by_hand() -> None:
    vl, tiles = model("qwen2.5-vl-7b"), model("internvl3-38b")
    # 840 / 28 = 30 by 560 / 28 = 20; three by two tiles and a thumbnail, 256 tokens each.
    assert llm_lengths(vl, IMAGE).input_mean == 300 + 600
    assert llm_lengths(tiles, IMAGE).input_mean == 300 + 7 * 256
    video = RequestClass(
        name="video+text",
        share=1.0,
        input_tokens=10,
        video=Video(frames=9, width_px=280, height_px=280),
    )
    # Two frames make one group, nine make five; with tiles every frame is one.
    assert llm_lengths(vl, video).input_mean == 10 + 5 * 100
    assert llm_lengths(tiles, video).input_mean == 10 + 9 * 256
    sound = RequestClass(name="audio+text", share=1.0, input_tokens=10, audio_s=8.0)
    assert llm_lengths(model("qwen2.5-omni-7b"), sound).input_mean == 10 + 200


def test_spread_is_that_of_the_text() -> None:
    klass = IMAGE.model_copy(update={"input_cv": 0.5, "output_cv": 2.0})
    lengths = llm_lengths(model("qwen2.5-vl-7b"), klass)
    assert lengths.input_mean_square == 900**2 + 150**2
    assert lengths.output_mean_square == 150**2 * 5


def test_a_talker_reads_what_the_llm_read_and_wrote() -> None:
    lengths = talker_lengths(model("qwen2.5-omni-7b"), "talker", SPEECH)
    assert (lengths.input_mean, lengths.output_mean) == (600, 30 * 50)
    assert talker_lengths(model("qwen3-omni-30b"), "talker", SPEECH).output_mean == 30 * 12.5


def test_bytes_by_hand() -> None:
    found = bytes_between(model("qwen2.5-omni-7b"), SPEECH)
    hidden, kv = 3584 * 2, 28 * 2 * 4 * 128 * 2
    assert found == {
        ("llm.prefill", "llm.decode"): 500 * kv,
        ("llm", "talker"): 600 * hidden,
        ("llm.prefill", "talker"): 500 * hidden,
        ("llm.decode", "talker"): 100 * hidden,
        ("talker", "vocoder"): 1500 * 4,
    }
    images = bytes_between(model("qwen2.5-vl-7b"), IMAGE)
    assert images["vision", "llm"] == images["vision", "llm.prefill"] == 600 * 3584 * 2


def test_bytes_of_pictures_by_hand() -> None:
    image = model("qwen-image")
    assert image_latents(image, PICTURE) == (64 * 64, 32 * 32)
    assert bytes_between(image, PICTURE) == {
        ("text", "dit"): 500 * 3584 * 2,
        ("dit", "vae"): 64 * 64 * 16 * 2,
    }
