"""Fields of a request that the stage engine does not know: refused where they would change the answer.

Others are left out, and named in the header `x-atoll-ignored`; with `strict: true` they are refused, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from atoll.runtime.openai import ApiError

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # Of OpenAI.
    "web_search_options": (),
    # Of vLLM and SGLang.
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "add_special_tokens": (False,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    "chat_template": (),
    "documents": ([],),
    "return_tokens_as_token_ids": (False,),
    "echo": (False,),
    "guided_whitespace_pattern": (),
    "thinking_token_budget": (),
    "ebnf": (),
    "regex": (),
    "stop_regex": ("", []),
    "custom_logit_processor": (),
    "lora_path": (),
    "no_stop_trim": (False,),
    "guided_json_object": (False,),
    # Of llama.cpp.
    "n_predict": (-1,),
    "repeat_penalty": (1.0,),
    "top_a": (0.0,),
    "tfs_z": (1.0,),
    "t_max_predict_ms": (0, -1),
    "n_indent": (0,),
    "response_fields": ([],),
    "samplers": (),
    "typical_p": (1.0,),
    "mirostat": (0,),
    "dynatemp_range": (0.0,),
    "xtc_probability": (0.0,),
    "dry_multiplier": (0.0,),
    "top_n_sigma": (-1.0,),
    "n_probs": (0,),
    "lora": ([],),
}
"""Fields that change an answer, or what is shown of it, with the values that do not."""
_ADDED = frozenset({"strict", "timings_per_token"})
"""Known here: the last is asked for by gateways, who count tokens by what comes with every answer."""
_MAX_SHOWN, _MAX_CHARS = 16, 64


def check_fields(body: bytes, known: Collection[str]) -> tuple[str, ...]:
    """Return the names of fields that are left out; ApiError for one that must not be."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    unknown = [name for name in fields if name not in known and name not in _ADDED]
    for name in unknown:
        if name not in _NEUTRAL:
            continue
        value = msgspec.json.decode(fields[name])
        if value is not None and value not in _NEUTRAL[name]:
            raise ApiError(400, f"this engine does not know {name}", param=name)
    strict = "strict" in fields and msgspec.json.decode(fields["strict"])
    if strict not in (True, False, None):
        raise ApiError(400, "strict is true or false", param="strict")
    others = [name for name in unknown if name not in _NEUTRAL]
    if strict and others:
        message = f"this engine does not know {others[0][:_MAX_CHARS]!r}, and strict is true"
        raise ApiError(400, message, param=others[0][:_MAX_CHARS])
    return tuple(sorted(others))


def name_ignored(names: Collection[str]) -> tuple[tuple[str, str], ...]:
    """Return the header that names what was left out."""
    shown = [name for name in names if name.isascii() and name.isidentifier()]
    if not names:
        return ()
    listed = [name[:_MAX_CHARS] for name in shown[:_MAX_SHOWN]]
    more = len(names) - len(listed)
    return (("x-atoll-ignored", ", ".join([*listed, *([f"and {more} more"] if more else [])])),)
