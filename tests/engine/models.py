"""Tiny models with random weights, and what transformers answers with them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 97
LAYERS = 4
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
# Random tied weights make a model that repeats its last token for ever.
_UNTIED = {"tie_word_embeddings": False}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "phi3": ("Phi3Config", {}),
    "gemma": ("GemmaConfig", {"head_dim": 8, **_UNTIED}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 8, **_UNTIED}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 8, **_UNTIED}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "qwen3-moe-mixed": (
        "Qwen3MoeConfig",
        {
            "head_dim": 8,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [2],
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "GptOssConfig",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": _YARN,
        },
    ),
}


class Tiny:
    """A saved model and its own answers, which everything else is held against."""

    def __init__(self, folder: Path, architecture: str, **changes: Any) -> None:
        name, more = ARCHITECTURES[architecture]
        config = getattr(transformers, name)(**(_BASE | more | changes))
        torch.manual_seed(7)
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter in self.model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0.0, 0.25)
            else:
                parameter.data += 0.1 * torch.randn_like(parameter)
        self.folder = folder
        with contextlib.redirect_stderr(io.StringIO()):
            self.model.save_pretrained(folder)
        self._answer = lru_cache(maxsize=None)(self._generate)

    def answer(self, prompt: Sequence[int], count: int) -> list[int]:
        """The next `count` tokens of greedy decoding by transformers."""
        # Greedy answers are prefixes of longer ones, so a long one serves every length.
        longest = self._answer(tuple(prompt), max(count, 24))
        return longest[:count]

    def _generate(self, prompt: tuple[int, ...], count: int) -> list[int]:
        tokens = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answer: list[int] = tokens[0, len(prompt) :].tolist()
        return answer
