"""A tiny model with random weights and a tokenizer of single characters: quick, and hard to guess."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

LAYERS = 4
LONGEST = 1024
# A space is written as byte-level tokenizers write it, so that answers can be guided.
_CHARACTERS = ["\u0120", *(chr(code) for code in range(33, 127))]


def write_tiny_model(folder: Path, seed: int = 7, width: int = 32) -> Path:
    """Write the model to a folder that does not hold it yet, and return it; its four heads split `width`."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"<end>": 0} | {c: i + 1 for i, c in enumerate(_CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    settings = {"eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        eos_token_id=0,
        bos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.25)
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
    return folder
