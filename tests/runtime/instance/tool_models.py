"""Tokenizers and templates of models that write calls each in their own way, and answers by chance."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll.core.request_parameters import OutputFormat
from atoll.engine.guidance import MatcherFactory
from atoll.engine.text import TextCodec

Json = dict[str, Any]
LONGEST = 4096
END = "<|end|>"
_HEAD = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
_TAIL = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


def _template(written: str) -> str:
    """A template in which `written` is how a call (c) of a message (m) is told."""
    calls = "{% for c in m.tool_calls or [] %}" + written + "{% endfor %}"
    message = "<|{{ m.role }}|>{{ m.content }}" + calls + END
    return _HEAD + "{% for m in messages %}" + message + "{% endfor %}" + _TAIL


_HERMES = _template(
    '<tool_call>\n{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
)
_LLAMA = '{#- {"name": function name, "parameters": dictionary of arguments} -#}' + _template(
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments|tojson }}}'
)
_MISTRAL = _template(
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    '[TOOL_CALLS][{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}]'
)
_ARGS = _template("[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}")
_PLAIN = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    + _TAIL
)
_NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    + _PLAIN
)
MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "hermes": (_HERMES, ("<tool_call>", "</tool_call>")),
    "hermes-letters": (_HERMES, ()),
    "llama": (_LLAMA, ("<|python_tag|>",)),
    "mistral": (_MISTRAL, ("[TOOL_CALLS]",)),
    "mistral-letters": (_MISTRAL, ()),
    "mistral-args": (_ARGS, ("[TOOL_CALLS]", "[ARGS]")),
    "plain": (_PLAIN, ()),
    "no-system": (_NO_SYSTEM, ()),
}
"""By name: the template, and the marks that are tokens of their own."""


def write_tool_model(folder: Path, name: str) -> TextCodec:
    """Write the tokenizer and template of a model of `MODELS`; letters, and a few words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    template, marks = MODELS[name]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate(letters)}
    merges = [("o", "o"), ("n", "a"), ("m", "e"), ("na", "me"), ('"', ":"), ("}", "}"), ("{", '"')]
    for left, right in merges:
        words[left + right] = len(words)
    tokenizer = Tokenizer(models.BPE(words, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    named = (END, "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")
    # Qwen's marks are no special tokens to its tokenizer, Mistral's and Llama's are.
    added = [AddedToken(t, special=True) for t in named]
    added += [AddedToken(t, special=t != "<tool_call>") for t in marks]
    tokenizer.add_tokens(added)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": template, "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "eos_token_id": tokenizer.token_to_id(END),
        "max_position_embeddings": LONGEST,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "vocab_size": tokenizer.get_vocab_size(),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return TextCodec(folder)


def matchers(codec: TextCodec) -> MatcherFactory:
    return MatcherFactory(codec.folder, codec.vocabulary, codec.eos)


def draw_answer(
    codec: TextCodec, guide: OutputFormat, seed: int, *, begin: Sequence[int] = (), most: int = 400
) -> list[int]:
    """The tokens of an answer that follows a guide and is left to chance otherwise.

    Chance is by seed and position, so an answer that goes on from its beginning is the same.
    """
    matcher = matchers(codec).matcher(guide)
    matcher.feed(begin)
    tokens = list(begin)
    while len(tokens) < most and not matcher.done:
        drawn = random.Random(seed * 100_003 + len(tokens))
        allowed = matcher.compute_allowed(codec.vocabulary).nonzero()[0].tolist()
        ends = [token for token in allowed if token in codec.eos]
        # Among all letters the few that end something would hardly ever come; half of `most` is long enough.
        over = drawn.random() < 0.3 or len(tokens) >= most // 2
        token = ends[0] if ends and over else drawn.choice(allowed)
        tokens.append(token)
        matcher.feed([token])
        if token in codec.eos:
            break
    return tokens


def tool(name: str, **properties: Json) -> Json:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


WEATHER = tool(
    "get_weather",
    city={"enum": ["Oslo", 'a "b" {c}', "\u00c5s \\ \u6c34"]},
    days={"type": "integer", "minimum": 1, "maximum": 14},
)
ADD = tool("add", numbers={"type": "array", "items": {"enum": [1, 22, -3.5]}, "maxItems": 3})
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, ADD, NOW]
