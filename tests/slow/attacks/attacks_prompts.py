"""Attacks on the engine: prompts, schemas, tools and lists that cost more than they look."""

# ruff: noqa: E501 - a row a line
from __future__ import annotations

import json
from typing import Any

from tests.slow.attacks.attacks_case import (
    BAD,
    FINE,
    TOO_LARGE,
    Attack,
    Row,
    ask_model,
    deep_schema,
)
from tests.slow.attacks.attacks_site import TINY
from tests.slow.attacks.attacks_wire import CHAT, chat_body

_COMPLETIONS = "/v1/completions"


def _prompt(prompt: object, **fields: object) -> dict[str, Any]:
    return {"model": TINY, "prompt": prompt, "max_tokens": 4} | fields


def _chat(**fields: object) -> dict[str, Any]:
    return {
        "model": TINY,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
    } | fields


def _schema(schema: object) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return _chat(response_format=form)


def _tools(count: int, parameters: object) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": f"f{i}", "parameters": parameters}}
        for i in range(count)
    ]


def _prompts() -> list[Attack]:
    many = 6_000_000
    texts: list[Row] = [
        ("30 MB of one word", lambda: json.dumps(_prompt("word " * many)).encode(), BAD),
        ("30 MB of one letter", lambda: json.dumps(_prompt("a" * 5 * many)).encode(), BAD),
        ("30 MB of spaces", lambda: json.dumps(_prompt(" " * 5 * many)).encode(), BAD),
        ("24 MB of emoji", lambda: json.dumps(_prompt("\U0001f600" * many), ensure_ascii=False).encode(), BAD),
        ("16 MB of combining marks", lambda: json.dumps(_prompt("e" + "\u0301" * 8_000_000), ensure_ascii=False).encode(), BAD),
        ("5,000,000 tokens", lambda: json.dumps(_prompt([1] * 5_000_000)).encode(), TOO_LARGE),
        ("100,000 tokens", _prompt([1] * 100_000), BAD),
        ("100,000 prompts", _prompt(["a"] * 100_000), BAD),
        ("1,000,000 empty lists", lambda: json.dumps(_prompt([[]] * 1_000_000)).encode(), BAD),
        ("a token too large", _prompt([10**9]), BAD),
        ("a token of 2^31", _prompt([2**31]), BAD),
        ("negative tokens", _prompt([-5, -6]), BAD),
        ("tokens and texts", _prompt([1, "a", [2]]), BAD),
        ("an empty prompt", _prompt(""), BAD),
        ("no prompt", {"model": TINY}, BAD),
        ("a prompt of NUL", _prompt("\0" * 100), BAD),
        ("a lone surrogate", b'{"model":"tiny","prompt":"\\ud800","max_tokens":4}', BAD),
        ("as long as it may be", _prompt("a" * 1023, max_tokens=4), FINE),
        ("one more than that", _prompt("a" * 1025), BAD),
        ("special tokens as text", _prompt("<end>" * 200), FINE),
    ]  # fmt: skip
    chats: list[Row] = [
        ("chat: 30 MB of one word", lambda: chat_body(TINY, "word " * many), BAD),
        ("chat: 50,000 messages", lambda: json.dumps(_chat(messages=[{"role": "user", "content": "a"}] * 50_000)).encode(), BAD),
        ("chat: template injection", _chat(messages=[{"role": "user", "content": "{{ 7*7 }}{% for i in range(10**9) %}x{% endfor %}"}]), FINE),
        ("chat: an unknown role", _chat(messages=[{"role": "root", "content": "a"}]), BAD),
        ("chat: null content", _chat(messages=[{"role": "user", "content": None}]), BAD),
        ("chat: a picture", _chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]), BAD),
        ("chat: vectors of nonsense", _chat(messages=[{"role": "user", "content": [{"type": "embeds", "embeds": "!!!!"}]}]), BAD),
        ("chat: functions", _chat(functions=[{"name": "f", "parameters": {}}]), FINE),
        ("chat: sound", _chat(modalities=["text", "audio"], audio={"voice": "a", "format": "wav"}), BAD),
    ]  # fmt: skip
    return [*ask_model("prompts", _COMPLETIONS, texts), *ask_model("prompts", CHAT, chats)]


def _lists() -> list[Attack]:
    rows: list[Row] = [
        ("1,000,000 stop_token_ids", lambda: json.dumps(_chat(stop_token_ids=list(range(1_000_000)))).encode(), BAD),
        ("10,000 stop_token_ids", _chat(stop_token_ids=list(range(10_000))), BAD),
        ("stop_token_ids of 10^30", _chat(stop_token_ids=[10**30]), BAD),
        ("negative stop_token_ids", _chat(stop_token_ids=[-1]), BAD),
        ("1,000,000 stop texts", lambda: json.dumps(_chat(stop=["a"] * 1_000_000)).encode(), BAD),
        ("64 stop texts of 100 kB", lambda: json.dumps(_chat(stop=["a" * 100_000] * 64)).encode(), BAD),
        ("a stop text of 20 MB", lambda: json.dumps(_chat(stop="a" * 20_000_000)).encode(), BAD),
        ("an empty stop", _chat(stop=""), FINE),
        ("logit_bias of 1,000,000", lambda: json.dumps(_chat(logit_bias={str(i): 1 for i in range(1_000_000)})).encode(), BAD),
        ("logit_bias of words", _chat(logit_bias={"hello": 1}), BAD),
        ("logit_bias of 10^6", _chat(logit_bias={"5": 1e6}), BAD),
        ("logit_bias of a million digits", _chat(logit_bias={"1" * 1_000_000: 1}), BAD),
        ("logit_bias of all tokens", _chat(logit_bias={str(i): -100 for i in range(96)}), FINE),
        ("logit_bias of other digits", _chat(logit_bias={"\u0663": 1}), FINE),
        ("n 128", _chat(n=128), BAD),
        ("n 129", _chat(n=129), BAD),
        ("best_of 10^6", _prompt("a", best_of=10**6), BAD),
        ("best_of below n", _prompt("a", n=4, best_of=2), BAD),
        ("max_tokens 0", _chat(max_tokens=0), BAD),
        ("max_tokens 2^31 - 1", _chat(max_tokens=2**31 - 1), FINE),
        ("temperature 1e-320", _chat(temperature=1e-320), FINE),
        ("temperature 2", _chat(temperature=2), FINE),
        ("top_p 0", _chat(top_p=0), FINE),
        ("top_p 1e-320", _chat(top_p=1e-320), FINE),
        ("top_k 10^9", _chat(top_k=10**9), FINE),
        ("top_k -5", _chat(top_k=-5), BAD),
        ("min_p 5", _chat(min_p=5), BAD),
        ("min_p -1", _chat(min_p=-1), BAD),
        ("repetition_penalty 0", _chat(repetition_penalty=0), BAD),
        ("repetition_penalty -1", _chat(repetition_penalty=-1), BAD),
        ("repetition_penalty 1e300", _chat(repetition_penalty=1e300), BAD),
        ("repetition_penalty 1e-320", _chat(repetition_penalty=1e-320), BAD),
        ("seed 2^63 - 1", _chat(seed=2**63 - 1, n=4), FINE),
        ("seed -2^63", _chat(seed=-(2**63)), FINE),
        ("top_logprobs 21", _chat(logprobs=True, top_logprobs=21), BAD),
        ("top_logprobs without logprobs", _chat(top_logprobs=3), BAD),
        ("resume of nonsense", _chat(atoll={"resume": {"text": "a" * 5000, "tokens": -5}}), BAD),
        ("resume of 10^6 tokens", lambda: json.dumps(_chat(atoll={"resume": {"text": "", "tokens": 1, "token_ids": [1] * 1_000_000}})).encode(), BAD),
        ("resume with tokens too large", _chat(atoll={"resume": {"text": "", "tokens": 1, "token_ids": [10**9]}}), BAD),
        ("resume with negative tokens", _chat(atoll={"resume": {"text": "", "tokens": 1, "token_ids": [-1]}}), BAD),
        ("resume that is none", _chat(atoll=[1]), BAD),
    ]  # fmt: skip
    made = []
    for row in rows:
        body = row[1]
        path = _COMPLETIONS if isinstance(body, dict) and "prompt" in body else CHAT
        made += ask_model("lists", path, [row])
    return made


def _schemas() -> list[Attack]:
    recursive = {
        "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    }  # fmt: skip
    doubling: dict[str, Any] = {"a0": {"type": "string"}}
    for i in range(1, 40):
        ref = {"$ref": f"#/$defs/a{i - 1}"}
        doubling[f"a{i}"] = {
            "type": "object",
            "properties": {"l": ref, "r": ref},
            "required": ["l", "r"],
        }
    deep_text = (
        b'{"model":"tiny","messages":[{"role":"user","content":"a"}],"response_format":{"type":"json_schema","json_schema":{"name":"s","schema":'
        + b'{"a":' * 20_000
        + b"1"
        + b"}" * 20_000
        + b"}}}"
    )
    rows: list[Row] = [
        ("no schema", _chat(response_format={"type": "json_schema"}), BAD),
        ("a schema that is a text", _schema("hello"), BAD),
        ("a type that is none", _schema({"type": "elephant"}), BAD),
        ("properties that are a list", _schema({"type": "object", "properties": [1]}), BAD),
        ("depth 50", _schema(deep_schema(50)), BAD),
        ("depth 200", _schema(deep_schema(200)), BAD),
        ("depth 20,000", deep_text, BAD),
        ("a $ref to itself", _schema(recursive), BAD),
        ("a $ref to nowhere", _schema({"$ref": "#/$defs/none"}), BAD),
        ("a $ref to a file", _schema({"$ref": "file:///etc/passwd"}), BAD),
        ("a $ref to a URL", _schema({"$ref": "http://169.254.169.254/"}), BAD),
        ("2^40 by $ref", _schema({"$defs": doubling, "$ref": "#/$defs/a39"}), FINE),
        ("an enum of 50,000", _schema({"enum": [f"value-{i:06d}" for i in range(50_000)]}), BAD),
        ("an enum of 1 MB", lambda: json.dumps(_schema({"enum": ["x" * 1_000_000]})).encode(), BAD),
        ("an empty enum", _schema({"enum": []}), BAD),
        ("500 anyOf of 500", _schema({"anyOf": [{"type": "object", "properties": {f"p{j}": {"type": "string"} for j in range(50)}} for _ in range(200)]}), BAD),
        ("allOf of allOf", _schema({"allOf": [{"allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(20)]}]}), BAD),
        ("a pattern that explodes", _schema({"type": "string", "pattern": "^(a|a?)+$" * 20}), BAD),
        ("a pattern of {1,100000}", _schema({"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}), FINE),
        ("a pattern that is none", _schema({"type": "string", "pattern": "(["}), BAD),
        ("a pattern with look-behind", _schema({"type": "string", "pattern": "(?<=a)b"}), BAD),
        ("minItems 10^9", _schema({"type": "array", "items": {"type": "null"}, "minItems": 10**9}), FINE),
        ("minLength 10^9", _schema({"type": "string", "minLength": 10**9}), FINE),
        ("multipleOf 1e-300", _schema({"type": "number", "multipleOf": 1e-300, "minimum": 1e300}), BAD),
        ("minimum above maximum", _schema({"type": "integer", "minimum": 5, "maximum": 1}), BAD),
        ("an impossible schema", _schema({"not": {}}), BAD),
        ("false", _schema({"type": "object", "properties": {"a": False}, "required": ["a"]}), BAD),
        ("an unknown form", _chat(response_format={"type": "xml"}), BAD),
        ("a regex that is none", _chat(guided_regex="(["), BAD),
        ("a regex that explodes", _chat(guided_regex="((((a{1,100}){1,100}){1,100}){1,100})"), FINE),
        ("a regex with look-ahead", _chat(guided_regex="(?=a)b"), BAD),
        ("a regex of 10 MB", lambda: json.dumps(_chat(guided_regex="a" * 10_000_000)).encode(), BAD),
        ("a regex of 60 kB", _chat(guided_regex="(a|b)" * 12_000), FINE),
        ("a regex with nothing in it", _chat(guided_regex="[^\\s\\S]"), BAD),
    ]  # fmt: skip
    return ask_model("schemas", CHAT, rows)


def _tool_bombs() -> list[Attack]:
    plain = {"type": "object", "properties": {"a": {"type": "string"}}}
    rows: list[Row] = [
        ("100,000 tools", lambda: json.dumps(_chat(tools=_tools(100_000, plain))).encode(), BAD),
        ("5,000 tools", _chat(tools=_tools(5000, plain)), BAD),
        ("two tools of one name", _chat(tools=_tools(1, plain) * 2, tool_choice="required"), BAD),
        ("a tool without a name", _chat(tools=[{"type": "function", "function": {}}]), BAD),
        ("a tool that is a text", _chat(tools=["f"]), BAD),
        ("a name of 100 kB", _chat(tools=[{"type": "function", "function": {"name": "f" * 100_000}}]), BAD),
        ("a name with quotes", _chat(tools=[{"type": "function", "function": {"name": 'f"}\n<end>'}}], tool_choice="required"), BAD),
        ("deep parameters", _chat(tools=_tools(1, deep_schema(150)), tool_choice="required"), BAD),
        ("parameters that are none", _chat(tools=_tools(1, {"type": "elephant"}), tool_choice="required"), BAD),
        ("parameters with a $ref to itself", _chat(tools=_tools(1, {"$ref": "#"}), tool_choice="required"), BAD),
        ("parameters with a pattern", _chat(tools=_tools(1, {"type": "object", "properties": {"a": {"type": "string", "pattern": "(["}}}), tool_choice="required"), BAD),
        ("parameters of 10 MB", lambda: json.dumps(_chat(tools=_tools(1, {"type": "object", "description": "d" * 10_000_000}))).encode(), BAD),
        ("a tool_choice that is not there", _chat(tools=_tools(1, plain), tool_choice={"type": "function", "function": {"name": "g"}}), BAD),
        ("a tool_choice of nonsense", _chat(tools=_tools(1, plain), tool_choice="sometimes"), BAD),
        ("a tool_choice without tools", _chat(tool_choice="required"), BAD),
        ("no tools", _chat(tools=[]), FINE),
        ("an answer of no tool", _chat(messages=[{"role": "tool", "tool_call_id": "x", "content": "a"}]), BAD),
        ("calls that are none", _chat(messages=[{"role": "assistant", "content": None, "tool_calls": "x"}, {"role": "user", "content": "a"}]), BAD),
        ("arguments that are no JSON", _chat(messages=[{"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{{{"}}]}, {"role": "tool", "tool_call_id": "a", "content": "b"}]), BAD),
    ]  # fmt: skip
    return ask_model("tools", CHAT, rows)


def attacks() -> list[Attack]:
    """Return the attacks on the engine."""
    return [*_prompts(), *_lists(), *_schemas(), *_tool_bombs()]
