"""Tiny checkpoints of vision-language models and of Whisper, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.engine.tokens import write_tokenizer

VOCABULARY = 300
END, IMAGE, VIDEO, BEFORE, AFTER = 260, *range(264, 268)
"""Tokens: where an answer ends, and those after the small tokenizer's own."""
_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": 0,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEFORE,
    "vision_end_token_id": AFTER,
}
_QWEN_IMAGES = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 2048},
}
_MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_TILES = {"height": 16, "width": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], tuple[str, ...]]] = {
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {
            "text_config": _TEXT | {"rope_parameters": _MROPE},
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 4,
                "out_hidden_size": 32,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            }
            | _PATCHES,
            **_QWEN_TOKENS,
        },
        "Qwen2VLImageProcessorPil",
        _QWEN_IMAGES,
        _MARKS,
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "text_config": _TEXT | {"rope_parameters": _MROPE | {"mrope_interleaved": True}},
            "vision_config": {
                "depth": 4,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 4,
                "out_hidden_size": 32,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1, 2],
            }
            | _PATCHES,
            **_QWEN_TOKENS,
        },
        "Qwen2VLImageProcessorPil",
        _QWEN_IMAGES,
        _MARKS,
    ),
    "internvl": (
        "InternVL",
        {
            "text_config": _TEXT | {"model_type": "qwen2"},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": [16, 16],
                "patch_size": [4, 4],
            },
            "image_token_id": IMAGE,
            "image_seq_length": 4,
        },
        "GotOcr2ImageProcessorPil",
        {"size": _TILES, "max_patches": 4, "min_patches": 1},
        ("<IMG_CONTEXT>", "<video>", "<img>", "</img>"),
    ),
    "gemma3": (
        "Gemma3",
        {
            "text_config": _TEXT | {"query_pre_attn_scalar": 8, "sliding_window": 16},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 16,
                "patch_size": 4,
                "vision_use_head": False,
            },
            "mm_tokens_per_image": 4,
            "image_token_id": IMAGE,
            "boi_token_index": BEFORE,
            "eoi_token_index": AFTER,
        },
        "Gemma3ImageProcessorPil",
        {"size": _TILES},
        ("<image_soft_token>", "<video>", "<start_of_image>", "<end_of_image>"),
    ),
}
"""By family: prefix of its classes, its sizes, its image processor and that one's sizes, and its marks in
text: a picture's vector, a video's, and what stands before and after a picture."""


def write_checkpoint(folder: Path, family: str, seed: int = 0) -> Any:
    """Write a tiny model of a family, with its tokens and its image processor, and return it."""
    prefix, sizes, processor, pictures, marks = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{prefix}Config")(**sizes)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    _spread(model)
    with torch.no_grad():
        # As a model that was taught, it never says a mark itself.
        model.lm_head.weight[IMAGE : AFTER + 1] = 0.0
    model.generation_config = transformers.GenerationConfig(eos_token_id=END, pad_token_id=0)
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCABULARY)
    _add_marks(folder, marks)
    getattr(transformers, processor)(**pictures).save_pretrained(folder)
    return model


def write_whisper(folder: Path) -> Any:
    """Write a tiny Whisper, and return it."""
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=8,
        max_target_positions=24,
        decoder_start_token_id=261,
        pad_token_id=263,
        bos_token_id=261,
        eos_token_id=END,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    _spread(model)
    model.generation_config.max_length = 12
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCABULARY)
    _name_tokens(folder)
    transformers.WhisperFeatureExtractor(feature_size=8).save_pretrained(folder)
    return model


def picture(height: int, width: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return noise of a size."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3))
    return noise.astype(np.uint8)


def _spread(model: Any) -> None:
    """Widen random weights: as they begin, some are 0, and answers hardly depend on what was seen."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(6.0) if weight.any() else weight.normal_(std=0.1)


def _add_marks(folder: Path, marks: tuple[str, ...]) -> None:
    from tokenizers import AddedToken, Tokenizer

    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    assert tokenizer.token_to_id(marks[0]) == IMAGE
    tokenizer.save(path)
    _name_tokens(folder)


def _name_tokens(folder: Path) -> None:
    """Name the tokenizer's tokens as transformers reads them."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["eos_token"] = settings["pad_token"] = settings["eos_token"]["content"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
