"""A tiny random model that has a tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.engine.models import Tiny
from tests.engine.tokens import write_tokenizer

_VOCABULARY = 264
_END = 260


class TinyChat(Tiny):
    """A `Tiny` whose folder can be asked in text."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "llama", vocab_size=_VOCABULARY, eos_token_id=_END)
        write_tokenizer(folder, _VOCABULARY)

    def own_rows(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        """What the embedding layer gives for tokens."""
        with torch.inference_mode():
            rows: np.ndarray[Any, Any] = self.model.get_input_embeddings()(
                torch.tensor(tokens)
            ).numpy()
        return rows
