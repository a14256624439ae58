"""A model that counts, or calls a tool.

Whatever it is asked, it says 000 001 002 ...; asked for the weather, it calls a tool, twice; to those who
say hello it says so, and if it may not end there, it calls.

Its next token is a function of its last one: embeddings are unit vectors, layers cost time and add nothing,
and the head holds the table of successors. So every engine says the same, also one that goes on from the
text of another, and a token that is lost or doubled shows in the text. Where a grammar forbids the successor,
a fixed order of preference decides, by which strings, lists and objects end as soon as they may.

It is written in Hugging Face's format and as GGUF, both in float32.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.gguf_head import begin_gguf

CONTEXT = 2048
NUMBERS = 1000
END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
CALLER, GREETER = "<|caller|>", "<|greeter|>"
"""Begin an answer that calls, and one that is short; some engines take a token `<|call|>` for an end."""
_SPECIAL = (END, USER, ASSISTANT, CALLER, GREETER, "<|system|>", "<|tool|>")
# A space is written as byte-level tokenizers write it, and so is the end of a line.
_LETTERS = "abcde"
_LEGS = tuple(f"\u0120{''.join(leg)}" for leg in product(_LETTERS, repeat=3))
_BEGIN = '<tool_call>\u010a{"name":\u0120"get_weather",\u0120"arguments":\u0120{'
_CALLS = (
    *(_BEGIN, '"city', '":', '"Paris', *_LEGS, '"}}\u010a</tool_call>'),
    *(f'\u010a{_BEGIN}"city":"', 'Rome"}}\u010a</tool_call>', END),
)
# Grammars that leave no choice of bytes leave none of tokens: these are read as they are said.
_MERGES = (("c", "i"), ("ci", "t"), ("cit", "y"), ('"', ":"))
HELLO = "Hello"
"""The short answer, to those who say hello."""
CITIES = ("Paris" + "".join(_LEGS).replace("\u0120", " "), "Rome")
"""Of which the model asks the weather, where it may call `get_weather` as it likes."""
_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}"
    "{% set asked = messages[-1].content or '' %}"
    "{% if tools and 'weather' in asked %}<|caller|>{% elif 'hello' in asked %}<|greeter|>"
    "{% else %}<|assistant|>{% endif %}{% endif %}"
)
_LIKED = {END: 8.0, _BEGIN: 7.0, '"': 6.0, "}": 5.0, "]": 5.0, ",": 4.0, "{": 3.5, ":": 3.2}
_LAYERS, _HEADS, _HEAD, _WIDE = 2, 4, 64, 1024


def count(start: int, tokens: int) -> str:
    """Return the text of so many tokens from a number on."""
    return "".join(f" {number:03d}" for number in range(start, min(start + tokens, NUMBERS)))


@dataclass(frozen=True, slots=True)
class CountingModel:
    """Where the model lies in both formats."""

    folder: Path
    gguf: Path


def write_counting_model(folder: Path) -> CountingModel:
    """Write the model below a folder, in `hf` and as `counting.gguf`."""
    words, merges = _vocabulary()
    target = folder / "hf"
    target.mkdir(parents=True)
    _write_tokenizer(target, words, merges)
    model = _build_model(words)
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(target)
    path = folder / "counting.gguf"
    _write_gguf(path, model, words, merges)
    return CountingModel(target, path)


def _vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    from tokenizers import pre_tokenizers

    words = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [*_MERGES]
    # " 123" and " abc" come to be from the left, sign by sign.
    for signs in ("0123456789", _LETTERS):
        for length in range(3):
            for left in product(signs, repeat=length):
                merges += [("\u0120" + "".join(left), sign) for sign in signs]
    words += [left + right for left, right in merges]
    # No merge leads to the others: they are said, and never read.
    words += [piece for piece in (HELLO, *_CALLS) if piece not in words]
    return words, merges


def _write_tokenizer(folder: Path, words: list[str], merges: list[tuple[str, str]]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(word, special=True) for word in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "chat_template": _TEMPLATE,
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _successors() -> dict[str, str]:
    numbers = [f"\u0120{number:03d}" for number in range(NUMBERS)]
    chains = ([ASSISTANT, *numbers, END], [CALLER, *_CALLS], [GREETER, HELLO, END])
    return {a: b for chain in chains for a, b in pairwise(chain)}


def _head(words: list[str]) -> NDArray[np.float32]:
    """Return the logits of every next token (rows) after every last one (columns)."""
    drawn = np.random.default_rng(7)
    liked = np.full(len(words), -8.0)
    for number, word in enumerate(words):
        if word in _LIKED:
            liked[number] = _LIKED[word]
        elif len(word) == 1:
            blank = word in "\u0120\u010a\u0109\u010d"
            liked[number] = -6.0 if blank else drawn.uniform(0.0, 3.0)
    head = np.repeat(liked[:, None], len(words), axis=1)
    ids = {word: number for number, word in enumerate(words)}
    for last, following in _successors().items():
        head[ids[following], ids[last]] = 24.0
    return head.astype(np.float32)


def _build_model(words: list[str]) -> Any:
    import torch
    import transformers

    width = math.ceil(len(words) / 64) * 64
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=width,
        intermediate_size=_WIDE,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        head_dim=_HEAD,
        max_position_embeddings=CONTEXT,
        eos_token_id=0,
        bos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.model.embed_tokens.weight.zero_()
        model.lm_head.weight.zero_()
        places = torch.arange(len(words))
        model.model.embed_tokens.weight[places, places] = 1.0
        # A unit vector is sqrt(width) long after the last norm.
        head = torch.from_numpy(_head(words)) / math.sqrt(width)
        model.lm_head.weight[:, : len(words)] = head
    return model


def _write_gguf(path: Path, model: Any, words: list[str], merges: list[tuple[str, str]]) -> None:
    import gguf

    config = model.config
    writer = begin_gguf(path, config)
    writer.add_name("counting")
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_rope_dimension_count(_HEAD)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    kinds = dict.fromkeys(_SPECIAL, gguf.TokenType.CONTROL)
    writer.add_token_types([int(kinds.get(word, gguf.TokenType.NORMAL)) for word in words])
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(_TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    # Queries and keys would have to be re-ordered, if anything came of attention.
    for name, tensor in model.state_dict().items():
        values = np.ascontiguousarray(tensor.float().numpy())
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
