"""Qwen-Image in three parts: together they paint what diffusers' whole pipeline paints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("diffusers", reason="needs the extra 'diffusion'")

import torch

from atoll.components.base import BadInputError, Setup
from atoll.components.qwen_image import QwenImageDit, QwenImageText, QwenImageVae
from atoll.tasks.library.drawing import DrawingOrder, Painting
from tests.components.asking import ask
from tests.components.checkpoints import write_checkpoint
from tests.reference.direct_tasks import run_directly

pytestmark = [pytest.mark.engine, pytest.mark.slow]
SIZE = {"height": 32, "width": 48}


def write_pipeline(folder: Path) -> Any:
    """Write a tiny Qwen-Image with random weights, and return diffusers' pipeline of it."""
    import diffusers
    from transformers import AutoTokenizer

    encoder = write_checkpoint(folder / "text", "qwen2_5_vl")
    torch.manual_seed(1)
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(8, 4, 4),
    )
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.0, 2.0, 0.5, 1.5],
    )
    pipeline = diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=encoder,
        tokenizer=AutoTokenizer.from_pretrained(folder / "text"),
        transformer=transformer,
    )
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(folder / "model")
    return pipeline


def test_three_parts_paint_what_the_pipeline_paints(tmp_path: Path) -> None:
    pipeline = write_pipeline(tmp_path)
    setup = Setup(options={"model": str(tmp_path / "model")})
    parts = {each.name: each.load(setup) for each in (QwenImageText, QwenImageDit, QwenImageVae)}
    for part in parts.values():
        (made,) = ask(part, part.example())
        assert not isinstance(made, BadInputError)

    def answer(invocation: Any) -> Any:
        (made,) = ask(parts[invocation.component], invocation.inputs)
        return made

    task = Painting({"image_sizes": ["48x32"]})
    painted = run_directly(task, DrawingOrder("the sea", n=2, seed=7, steps=3), answer).images
    for number, picture in enumerate(painted):
        expected = pipeline(
            "the sea",
            true_cfg_scale=1.0,
            num_inference_steps=3,
            generator=torch.Generator("cpu").manual_seed(7 + number),
            **SIZE,
        ).images[0]
        assert np.array_equal(np.asarray(picture), np.array(expected))
    first, second = (np.asarray(each) for each in painted)
    assert not np.array_equal(first, second)
    # Two prompts of unlike lengths in one pass are what they are alone, up to rounding.
    prompts = [{"prompt": "the sea"}, {"prompt": "a ship and the word"}]
    read = ask(parts["qwen-image-text"], *prompts)
    assert [len(each["embeds"]) for each in read] == sorted(len(e["embeds"]) for e in read)
    orders = [{**each, "steps": 2, "seed": 3, **SIZE} for each in read]
    wrong = [{**orders[0], "height": 33}, {**orders[0], "embeds": np.zeros((1, 3), np.float32)}]
    *together, high, thin = ask(parts["qwen-image-dit"], *orders, *wrong)
    assert (high.param, thin.param) == ("height", "embeds")
    for order, both in zip(orders, together, strict=True):
        (alone,) = ask(parts["qwen-image-dit"], order)
        assert np.allclose(alone["latents"], both["latents"], atol=1e-4)
