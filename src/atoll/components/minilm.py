"""Texts as vectors: all-MiniLM-L6-v2, a small BERT, with the mean over its tokens.

The network is written out here, since all that is needed of it is one pass forward.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from atoll.components.base import BadInputError, BatchComponent, Inputs, Output, Setup
from atoll.components.component_weights import MINILM
from atoll.core.errors import MissingDependencyError

if TYPE_CHECKING:
    from torch import Tensor

MAX_TOKENS = 256
"""Longer texts are cut off here, the two marks around every text included."""
_MAX_CHARS = 32_768
"""Cut off before tokens are made; 256 of them never need as many in any language."""


class MiniLm(BatchComponent):
    """Turns a text into 384 numbers of length 1; near texts have a large product."""

    name = "minilm"
    max_batch: ClassVar[int] = 32

    def __init__(self, network: BertEncoder, tokenizer: Any, device: str) -> None:
        self._network = network
        self._tokenizer = tokenizer
        self._device = device

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Fetch and read weights and vocabulary."""
        try:
            import torch
            from safetensors.torch import load_file
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingDependencyError("torch", "engine", needed_for=cls.name) from error
        config_file, weights, vocabulary = MINILM.fetch().values()
        torch.set_num_threads(setup.threads)
        tokenizer = Tokenizer.from_file(str(vocabulary))
        tokenizer.no_padding()
        tokenizer.enable_truncation(MAX_TOKENS)
        config = json.loads(config_file.read_text())
        network = BertEncoder(
            load_file(weights, setup.device),
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            epsilon=config["layer_norm_eps"],
        )
        return cls(network, tokenizer, setup.device)

    def example(self) -> Inputs:
        """Return two words."""
        return {"text": "hello world"}

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output | BadInputError]:
        """Embed texts together, padded to the longest."""
        import torch

        outputs: list[Output | BadInputError] = [_wrong(inputs.get("text")) for inputs in batch]
        good = [index for index, wrong in enumerate(outputs) if wrong is None]
        if not good:
            return outputs
        texts = [batch[index]["text"][:_MAX_CHARS] for index in good]
        tokens = [encoded.ids for encoded in self._tokenizer.encode_batch(texts)]
        lengths = torch.tensor([len(ids) for ids in tokens], device=self._device)
        longest = max(map(len, tokens))
        padded = torch.tensor(
            [ids + [0] * (longest - len(ids)) for ids in tokens], device=self._device
        )
        present = torch.arange(longest, device=self._device) < lengths[:, None]
        with torch.inference_mode():
            states = self._network.forward(padded, present)
            mean = (states * present[..., None]).sum(1) / lengths[:, None]
            vectors = torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()
        for index, ids, vector in zip(good, tokens, vectors, strict=True):
            outputs[index] = {"embedding": vector.copy(), "tokens": len(ids)}
        return outputs


class BertEncoder:
    """BERT's layers over weights with the names they have in files."""

    def __init__(
        self, weights: dict[str, Tensor], *, layers: int, heads: int, epsilon: float
    ) -> None:
        self._weights = weights
        self._layers = layers
        self._heads = heads
        self._epsilon = epsilon

    def forward(self, tokens: Tensor, present: Tensor) -> Tensor:
        """Return the last states [n, t, width] of tokens [n, t]; those not `present` are not looked at."""
        from torch.nn import functional

        weights = self._weights
        states = weights["embeddings.word_embeddings.weight"][tokens]
        states = states + weights["embeddings.position_embeddings.weight"][: tokens.shape[1]]
        states = states + weights["embeddings.token_type_embeddings.weight"][0]
        states = self._norm("embeddings.LayerNorm", states)
        seen = present[:, None, None, :]
        for number in range(self._layers):
            name = f"encoder.layer.{number}"
            query, key, value = (
                self._split(self._linear(f"{name}.attention.self.{part}", states))
                for part in ("query", "key", "value")
            )
            mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
            mixed = mixed.transpose(1, 2).flatten(2)
            mixed = self._linear(f"{name}.attention.output.dense", mixed)
            states = self._norm(f"{name}.attention.output.LayerNorm", states + mixed)
            wide = functional.gelu(self._linear(f"{name}.intermediate.dense", states))
            narrow = self._linear(f"{name}.output.dense", wide)
            states = self._norm(f"{name}.output.LayerNorm", states + narrow)
        return states

    def _split(self, states: Tensor) -> Tensor:
        """Return [n, heads, t, width of a head]."""
        apart: Tensor = states.unflatten(-1, (self._heads, -1))
        return apart.transpose(1, 2)

    def _linear(self, name: str, states: Tensor) -> Tensor:
        from torch.nn import functional

        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return functional.linear(states, weight, bias)

    def _norm(self, name: str, states: Tensor) -> Tensor:
        from torch.nn import functional

        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return functional.layer_norm(states, weight.shape, weight, bias, self._epsilon)


def _wrong(text: object) -> BadInputError | None:
    if not isinstance(text, str) or not text:
        return BadInputError("text has to be a text, and not an empty one", "text")
    try:
        text.encode()
    except UnicodeEncodeError:
        return BadInputError("text has half a character in it (a lone surrogate)", "text")
    return None
