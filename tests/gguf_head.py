"""The head of a GGUF file: the sizes of a Llama model."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def begin_gguf(path: Path, config: Any) -> Any:
    """Return a writer of a GGUF file that knows the sizes in a configuration of transformers."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    return writer
