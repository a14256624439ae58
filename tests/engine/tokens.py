"""A small byte-level tokenizer in a folder, with a chat template."""

from __future__ import annotations

import json
from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")


def write_tokenizer(folder: Path, vocabulary: int = 300) -> None:
    """Write tokenizer.json, tokenizer_config.json and a config.json into `folder`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate(letters)}
    merges = [("t", "h"), ("th", "e"), ("o", "r"), ("Ġ", "w")]
    for left, right in merges:
        words[left + right] = len(words)
    tokenizer = Tokenizer(models.BPE(words, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(SPECIAL[0])
    settings = {"chat_template": TEMPLATE, "eos_token": {"content": SPECIAL[0]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = folder / "config.json"
    if not config.exists():
        config.write_text(
            json.dumps(
                {
                    "eos_token_id": [end],
                    "max_position_embeddings": 64,
                    "num_hidden_layers": 4,
                    "vocab_size": vocabulary,
                }
            )
        )
