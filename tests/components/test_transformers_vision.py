"""Vision towers by themselves: what transformers' whole model sees, from the tower's weights alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs the extra 'engine'")

import torch

from atoll.components.base import BadInputError, Setup
from atoll.components.transformers_parts import load_part
from atoll.components.transformers_vision import TransformersVision
from atoll.core.errors import AtollError
from tests.components.asking import ask
from tests.components.checkpoints import FAMILIES, picture, write_checkpoint

pytestmark = pytest.mark.engine
SIZES = ((16, 16), (24, 40), (48, 16))
CUDA = torch.cuda.is_available()


def whole(model: Any, folder: Path, *pictures: Any) -> list[Any]:
    """What the whole model's own forward makes of pictures, prepared together by transformers."""
    from transformers import AutoImageProcessor

    options = {"crop_to_patches": True} if model.config.model_type == "internvl" else {}
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    ready = processor(images=list(pictures), return_tensors="pt", **options)
    tiles = ready.pop("num_patches", torch.ones(len(pictures))).long().tolist()
    ready = {name: ready[name] for name in ("pixel_values", "image_grid_thw") if name in ready}
    with torch.inference_mode():
        found = model.model.get_image_features(**ready)
    if isinstance(found.pooler_output, tuple):
        embeds = list(found.pooler_output)
    else:
        embeds = [rows.flatten(0, 1) for rows in found.pooler_output.split(tiles)]
    layers = getattr(found, "deepstack_features", None)
    deep = [torch.stack(each) for each in zip(*layers, strict=True)] if layers else None
    grids = ready["image_grid_thw"].tolist() if "image_grid_thw" in ready else None
    return [
        {
            "embeds": rows.numpy(),
            **({"grid": grids[number]} if grids else {}),
            **({"deepstack": deep[number].numpy()} if deep else {}),
        }
        for number, rows in enumerate(embeds)
    ]


def same(one: Any, other: Any, atol: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert np.shape(value) == np.shape(other[name])
        assert np.allclose(value, other[name], rtol=0, atol=atol), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_sees_what_the_whole_model_sees(family: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, family)
    vision = TransformersVision.load(Setup(options={"model": str(tmp_path)}))
    pictures = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    given = [{"image": each} for each in pictures]
    # Together, of unlike sizes: to the last bit what the whole model makes of them together.
    *seen, bad = ask(vision, *given, {"image": "no picture"})
    assert isinstance(bad, BadInputError)
    for one, other in zip(seen, whole(model, tmp_path, *pictures), strict=True):
        assert one["embeds"].any(axis=1).all()
        same(one, other)
    # Alone, too, and a batch changes nothing beyond rounding.
    for inputs, image, together in zip(given, pictures, seen, strict=True):
        (alone,) = ask(vision, inputs)
        same(alone, whole(model, tmp_path, image)[0])
        same(alone, together, atol=1e-4 * float(np.abs(alone["embeds"]).max()))
    assert ask(vision, vision.example())[0]["embeds"].shape[1] == 32


def test_only_a_towers_tensors_are_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = write_checkpoint(tmp_path, "qwen2_5_vl")
    expected = whole(model, tmp_path, picture(16, 24))[0]
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    # Under the names of published checkpoints; nothing of the language model is there.
    tower = {name: value for name, value in tensors.items() if name.startswith("visual.")}
    assert 0 < len(tower) < len(tensors)
    save_file(tower, path, {"format": "pt"})
    setup = Setup(options={"model": str(tmp_path), "dtype": "float32"})
    (seen,) = ask(TransformersVision.load(setup), {"image": picture(16, 24)})
    same(seen, expected)
    with pytest.raises(AtollError, match=r"tensors are missing, lm_head\.weight among them"):
        load_part(setup, "x", "vision", tower=False)


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gemma3")
    load = TransformersVision.load
    with pytest.raises(AtollError, match="no model"):
        load(Setup())
    with pytest.raises(AtollError, match="unknown dtype 'int4'"):
        load(Setup(options={"model": str(tmp_path), "dtype": "int4"}))
    with pytest.raises(AtollError, match="unknown option 'size'"):
        load(Setup(options={"model": str(tmp_path), "size": 3}))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(AtollError, match="model_type 'llama' is not known here"):
        load(Setup(options={"model": str(tmp_path)}))


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_sees_the_same_on_a_gpu(family: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, family)
    pictures = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    expected = whole(model, tmp_path, *pictures)
    options = {"model": str(tmp_path), "dtype": "float32"}
    vision = TransformersVision.load(Setup("cuda:0", options=options))
    seen = ask(vision, *({"image": each} for each in pictures))
    for one, other in zip(seen, expected, strict=True):
        same(one, other, atol=1e-3 * float(np.abs(other["embeds"]).max()))
