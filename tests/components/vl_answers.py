"""What transformers' own `generate` answers about pictures, by the whole model of a tiny checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.components.checkpoints import FAMILIES, IMAGE


def generate(model: Any, folder: Path, content: list[Any], max_tokens: int) -> list[int]:
    """Return the tokens of the greedy answer to a message of texts and pictures [height, width, 3]."""
    from transformers import AutoImageProcessor, AutoTokenizer

    kind = model.config.model_type
    mark, _, before, after = FAMILIES[kind][4]
    options = {"crop_to_patches": True} if kind == "internvl" else {}
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pictures = [part for part in content if not isinstance(part, str)]
    inputs: dict[str, Any] = {}
    counts: list[int] = []
    if pictures:
        ready = processor(images=pictures, return_tensors="pt", **options)
        inputs = {n: ready[n] for n in ("pixel_values", "image_grid_thw") if n in ready}
        if "image_grid_thw" in ready:
            counts = (ready["image_grid_thw"].prod(-1) // 4).tolist()
        else:
            tiles = ready.get("num_patches", torch.ones(len(pictures)))
            counts = [4 * int(each) for each in tiles]
    line = "\n\n" if kind == "gemma3" else ""
    left = iter(counts)
    said = [
        part if isinstance(part, str) else f"{line}{before}{mark * next(left)}{after}{line}"
        for part in content
    ]
    text = f"<|user|>{''.join(said)}<|end|><|assistant|>"
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    marked = (ids == IMAGE).long()
    assert marked.sum() == sum(counts)
    types = {"qwen2_5_vl": "mm_token_type_ids", "qwen3_vl": "mm_token_type_ids"}
    types["gemma3"] = "token_type_ids"
    if kind in types:
        inputs[types[kind]] = marked
    answer = model.generate(input_ids=ids, **inputs, do_sample=False, max_new_tokens=max_tokens)
    tokens: list[int] = answer[0, ids.shape[1] :].tolist()
    return tokens
