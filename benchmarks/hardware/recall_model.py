"""A model whose every next token depends on the first one of its prompt, by a wide margin.

Each layer reads a bit off the first token, through its KV cache, and adds it to a place of its own. Layers
take turns: the next token is one of two successors of the last, and the bit of the layer whose turn it is
says which. So an answer is right only if all layers have the KV of their own request, and none of its tokens
was lost or doubled; and it is the same in every batch and number format, where that of a random model is not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.hardware.gpu_promise_cases import write_model

if TYPE_CHECKING:
    import torch

_SCORE = 40.0
"""Least by which the first token is ahead of others before the softmax."""
_SURE = 2.0


@dataclass(frozen=True, slots=True)
class RecallModel:
    """Tokens of the model: first those that prompts begin with, then `2 * layers * each` words.

    A word is (layer that chose it, its bit, number); words are in this order.
    """

    layers: int
    firsts: int
    each: int

    @property
    def tokens(self) -> int:
        """Size of its vocabulary."""
        return self.firsts + 2 * self.layers * self.each

    def bits(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the bit that each layer reads off each first token, as [layers, firsts]."""
        return np.random.default_rng(11).integers(2, size=(self.layers, self.firsts))

    def successor(self, word: int, bit: int) -> int:
        """Return the word that follows where the next layer has this bit."""
        rest, number = divmod(word - self.firsts, self.each)
        layer, own = divmod(rest, 2)
        turn = (layer + 1) % self.layers
        following = ((4 * turn + 5) * number + 3 * turn + bit + own * (self.each // 2)) % self.each
        return self.firsts + (2 * turn + bit) * self.each + following

    def answer(self, prompt: list[int], tokens: int) -> list[int]:
        """Return what follows a prompt of one first token and words."""
        bits, word, said = self.bits(), prompt[-1], list[int]()
        for _ in range(tokens):
            layer = (word - self.firsts) // self.each // 2
            word = self.successor(word, int(bits[(layer + 1) % self.layers, prompt[0]]))
            said.append(word)
        return said

    def prompt(self, seed: int, tokens: int) -> list[int]:
        """Draw a prompt."""
        drawn = np.random.default_rng(seed)
        words = drawn.integers(self.firsts, self.tokens, size=tokens - 1)
        return [int(drawn.integers(self.firsts)), *map(int, words)]


def write_recall_model(name: str, folder: Path, *, firsts: int, each: int) -> RecallModel:
    """Write such a model in the shapes of another, in bf16, a file for every layer, unless it is there."""
    config = write_model(name, folder)
    made = RecallModel(config["num_hidden_layers"], firsts, each)
    config = write_model(name, folder, vocab_size=made.tokens, tie_word_embeddings=False)
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        names: dict[str, str] = {}
        for number, tensors in enumerate((_outer(made, config), *_layers(made, config))):
            file = f"part-{number:05d}.safetensors"
            _save(folder / file, tensors)
            names |= dict.fromkeys(tensors, file)
        index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return made


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    import torch
    from safetensors.torch import save_file

    save_file(
        {name: each.to(torch.bfloat16).contiguous() for name, each in tensors.items()},
        path,
        {"format": "pt"},
    )


def _outer(made: RecallModel, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Embeddings: a place for each token, one for all of them, one for first ones. Head: who follows whom."""
    import torch

    wide, tokens = config["hidden_size"], made.tokens
    embedding, head = torch.zeros(tokens, wide), torch.zeros(tokens, wide)
    embedding[torch.arange(tokens), torch.arange(tokens)] = 1.0
    embedding[:, tokens] = 1.0
    embedding[: made.firsts, tokens + 1] = 1.0
    for word in range(made.firsts, tokens):
        layer, bit = divmod((word - made.firsts) // made.each, 2)
        head[word, tokens + 2 + layer] = 1.0 if bit else -1.0
        for each in (0, 1):
            head[made.successor(word, each), word] = _SURE
    return {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(wide),
    }


def _layers(made: RecallModel, config: dict[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    import torch

    wide, inner, heads = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    size = config.get("head_dim") or wide // heads
    kv = size * config["num_key_value_heads"]
    tokens = made.tokens
    if tokens + 2 + made.layers > wide:
        raise ValueError(f"{tokens} tokens and {made.layers} layers need a wider model")
    # After the norm a place of 1 is at least `least`, and that of a first token in a first layer `most`.
    least, most = (math.sqrt(wide / places) for places in (3 + made.layers, 3))
    gain = math.sqrt(_SCORE * math.sqrt(size)) / least
    slowest = size // 2 - 1  # the place in a head that positions turn least
    signs = 2.0 * torch.from_numpy(made.bits()).float() - 1.0
    noise = 0.02 * torch.randn(inner, wide, generator=torch.Generator().manual_seed(3))
    for layer in range(made.layers):
        query, key = torch.zeros(heads * size, wide), torch.zeros(kv, wide)
        value, out = torch.zeros(kv, wide), torch.zeros(wide, heads * size)
        query[slowest, tokens] = key[slowest, tokens + 1] = gain
        value[0, : made.firsts] = signs[layer]
        out[tokens + 2 + layer, 0] = 1.0 / most
        named = {
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": value,
            "self_attn.o_proj": out,
            "mlp.gate_proj": noise,
            "mlp.up_proj": noise,
            # It costs what it costs in other models, and adds nothing.
            "mlp.down_proj": torch.zeros(wide, inner),
            "input_layernorm": torch.ones(wide),
            "post_attention_layernorm": torch.ones(wide),
        }
        yield {f"model.layers.{layer}.{name}.weight": each for name, each in named.items()}
