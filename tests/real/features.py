"""What engines can do behind the gateway: one probe for each feature, asked of the counting model.

A probe passes, or raises `Lacks` with what came instead. Nothing here knows which engine it asks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.real.counting_model import CITIES, HELLO, CountingModel, count
from tests.real.fleet import MODEL, Answer, Door, Json, Stream

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
COUNT = [{"role": "user", "content": "Count"}]
GREET = [{"role": "user", "content": "Say hello"}]
WEATHER = [{"role": "user", "content": "What is the weather?"}]
_WHY_CHARS = 70


def _tool(name: str, argument: str) -> Json:
    schema = {
        "type": "object",
        "properties": {argument: {"type": "string"}},
        "required": [argument],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [_tool("get_weather", "city"), _tool("get_time", "zone")]
_COLOURS = ("red", "green", "blue")


def build_schema(fields: int) -> Json:
    """Return a form with so many fields, each of three words."""
    names = [f"field{number:02d}" for number in range(fields)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "string", "enum": list(_COLOURS)} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": schema}}


def fits_schema(text: str, fields: int) -> bool:
    """Whether a text is an object of the schema with so many fields."""
    try:
        said = json.loads(text)
    except ValueError:
        return False
    names = [f"field{number:02d}" for number in range(fields)]
    return isinstance(said, dict) and [*said] == names and {*said.values()} <= {*_COLOURS}


FEW_FIELDS, MANY_FIELDS = 2, 24


class Lacks(Exception):  # noqa: N818 - what it says is no error
    """An engine does not have a feature."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A row of the table. `compared`: what an engine does behind the gateway and not alone is translated."""

    name: str
    probe: Callable[[Door], None]
    compared: bool = False
    translated: bool = False
    """Every engine is asked something else than the client asked."""


def need(answer: Answer) -> Any:
    """Return the body of an answer that came; Lacks with the engine's own words else."""
    if answer.status != 200:
        raise Lacks(f"{answer.status}: {_message(answer.body)}")
    return answer.body


def require(fact: bool, why: str) -> None:
    """Raise Lacks unless it is so."""
    if not fact:
        raise Lacks(why)


def _message(body: object) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    said = error.get("message", error) if isinstance(error, dict) else error
    text = " ".join(str(said).split())
    return text if len(text) <= _WHY_CHARS else f"{text[:_WHY_CHARS].rsplit(' ', 1)[0]} ..."


def chat(messages: list[Json], tokens: int = 400, **more: Any) -> Json:
    """Return a greedy request of chat."""
    return {
        "model": MODEL,
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        **more,
    }


def completion(prompt: str = "Count: 100", tokens: int = 4, **more: Any) -> Json:
    """Return a greedy request of completions."""
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}


def join_text(events: Iterable[Json]) -> str:
    """Return the text of a stream of chat; an error in it is Lacks."""
    return "".join(choice["delta"].get("content") or "" for choice in _choices(events))


def _choices(events: Iterable[Json]) -> Iterable[Json]:
    for event in events:
        if event.get("error"):
            raise Lacks(f"error in the stream: {_message(event)}")
        yield from event.get("choices") or []


def join_calls(events: Iterable[Json]) -> list[tuple[str, Any]]:
    """Return the calls of a stream of chat: names and arguments."""
    calls: dict[int, list[str]] = {}
    for choice in _choices(events):
        for piece in choice["delta"].get("tool_calls") or []:
            call = calls.setdefault(piece["index"], ["", ""])
            function = piece.get("function") or {}
            call[0] += function.get("name") or ""
            call[1] += function.get("arguments") or ""
    return [(name, _read(arguments)) for name, arguments in calls.values()]


def _read(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError as error:
        raise Lacks("arguments are no JSON") from error


def _calls(body: Json) -> list[tuple[str, Any]]:
    calls = body["choices"][0]["message"].get("tool_calls") or []
    return [(call["function"]["name"], _read(call["function"]["arguments"])) for call in calls]


def _text(body: Json) -> str:
    return body["choices"][0]["message"].get("content") or ""


def _chat(door: Door) -> None:
    body = need(door.post(CHAT, chat(COUNT, 8)))
    require(_text(body) == count(0, 8), f"it said {_text(body)!r}")
    require(body["usage"]["completion_tokens"] == 8, "usage is wrong")


def _chat_streamed(door: Door) -> None:
    body = chat(COUNT, 50, stream_options={"include_usage": True})
    events = list(need_stream(door.stream(CHAT, body)))
    require(join_text(events) == count(0, 50), "text is lost or doubled")
    usage = [event["usage"] for event in events if event.get("usage")]
    require(bool(usage) and usage[-1]["completion_tokens"] == 50, "usage is wrong")


def need_stream(stream: Stream) -> Stream:
    """Return a stream that came."""
    if stream.status != 200:
        raise Lacks(f"{stream.status}: {_message(json.loads(next(iter(stream))['error']))}")
    return stream


def _tools_auto(door: Door) -> None:
    body = need(door.post(CHAT, chat(WEATHER, tools=TOOLS)))
    calls = _calls(body)
    require(bool(calls), "no call is recognised")
    require(calls[0] == ("get_weather", {"city": CITIES[0]}), f"it called {calls[0]}")
    require(body["choices"][0]["finish_reason"] == "tool_calls", "finish_reason is wrong")
    body = need(door.post(CHAT, chat(GREET, tools=TOOLS)))
    require(_text(body).strip() == HELLO and not _calls(body), "it may not choose not to call")


def _tools_required(door: Door) -> None:
    body = need(door.post(CHAT, chat(GREET, tools=TOOLS, tool_choice="required")))
    require(bool(_calls(body)), "not heeded: it may answer without a call")


def _tools_named(door: Door) -> None:
    choice = {"type": "function", "function": {"name": "get_time"}}
    calls = _calls(need(door.post(CHAT, chat(WEATHER, tools=TOOLS, tool_choice=choice))))
    require([name for name, _ in calls] == ["get_time"], "not heeded: it may call another")


def _tools_parallel(door: Door) -> None:
    calls = _calls(need(door.post(CHAT, chat(WEATHER, tools=TOOLS))))
    require([a.get("city") for _, a in calls] == [*CITIES], f"{len(calls)} calls of 2")


def _tools_not_parallel(door: Door) -> None:
    body = chat(WEATHER, tools=TOOLS, parallel_tool_calls=False)
    calls = _calls(need(door.post(CHAT, body)))
    require(len(calls) == 1, f"{len(calls)} calls")


def _tools_streamed(door: Door) -> None:
    events = list(need_stream(door.stream(CHAT, chat(WEATHER, tools=TOOLS))))
    calls = join_calls(events)
    require([a.get("city") for _, a in calls] == [*CITIES], f"{len(calls)} calls of 2")
    pieces = sum(bool(choice["delta"].get("tool_calls")) for choice in _choices(events))
    require(pieces > len(calls) + 4, "calls come whole, not in deltas")


def _tool_history(door: Door) -> None:
    call = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    messages: list[Json] = [
        *WEATHER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_0", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": "Sunny"},
    ]
    body = need(door.post(CHAT, chat(messages, 6, tools=TOOLS)))
    require(_text(body).strip() == count(0, 6).strip(), f"it said {_text(body)!r}")


def _json_schema(door: Door) -> None:
    body = need(door.post(CHAT, chat(COUNT, response_format=build_schema(FEW_FIELDS))))
    require(fits_schema(_text(body), FEW_FIELDS), "not heeded")


def _json_object(door: Door) -> None:
    body = need(door.post(CHAT, chat(COUNT, response_format={"type": "json_object"})))
    try:
        said = json.loads(_text(body))
    except ValueError as error:
        raise Lacks("not heeded") from error
    require(isinstance(said, dict), "not heeded")


def _n(door: Door) -> None:
    choices = need(door.post(CHAT, chat(COUNT, 4, n=2) | {"temperature": 1.0, "seed": 1}))[
        "choices"
    ]
    require([c["message"]["content"] for c in choices] == [count(0, 4)] * 2, "not heeded")


def _best_of(door: Door) -> None:
    # The best of two is one answer for which the tokens of two were made.
    body = need(door.post(COMPLETIONS, completion(best_of=2) | {"temperature": 1.0}))
    require(len(body["choices"]) == 1, "not heeded: more than one answer")
    require(body["usage"]["completion_tokens"] == 8, "ignored: one answer is made")


def _echo(door: Door) -> None:
    text = need(door.post(COMPLETIONS, completion(echo=True)))["choices"][0]["text"]
    require(text == "Count: 100" + count(101, 4), "ignored")


def _suffix(door: Door) -> None:
    plain = need(door.post(COMPLETIONS, completion()))["usage"]["prompt_tokens"]
    body = need(door.post(COMPLETIONS, completion(suffix=" 200")))
    require(body["usage"]["prompt_tokens"] > plain, "ignored")


def _chat_logprobs(door: Door) -> None:
    choice = need(door.post(CHAT, chat(COUNT, 4, logprobs=True, top_logprobs=2)))["choices"][0]
    rows = (choice.get("logprobs") or {}).get("content") or []
    require([row["token"] for row in rows] == [f" {i:03d}" for i in range(4)], "ignored")
    require(all(len(row["top_logprobs"]) == 2 for row in rows), "top_logprobs is ignored")


def _completion_logprobs(door: Door) -> None:
    choice = need(door.post(COMPLETIONS, completion(logprobs=2)))["choices"][0]
    probabilities = choice.get("logprobs") or {}
    require("tokens" in probabilities or "content" in probabilities, "ignored")
    require("tokens" in probabilities, "in the shape of chat")
    require(probabilities["tokens"] == [f" {i}" for i in range(101, 105)], "wrong tokens")


def _stop(door: Door) -> None:
    body = need(door.post(CHAT, chat(COUNT, 50, stop=[" 007"])))
    require(_text(body) == count(0, 7), f"it said {_text(body)!r}")


def _embeddings(door: Door) -> None:
    rows = need(door.post("/v1/embeddings", {"model": MODEL, "input": ["one", "two"]}))["data"]
    require(len(rows) == 2 and len(rows[0]["embedding"]) > 1, "no vectors")


def _tokenize(door: Door) -> None:
    body = need(door.post("/tokenize", {"model": MODEL, "prompt": "a 123"}))
    require(body.get("count") == 2 == len(body.get("tokens", ())), "another shape")


def _tokenize_messages(door: Door) -> None:
    body = need(door.post("/tokenize", {"model": MODEL, "messages": COUNT}))
    require(bool(body.get("tokens")), "another shape")


def _detokenize(door: Door) -> None:
    tokens = need(door.post("/tokenize", {"model": MODEL, "prompt": "a 123"}))["tokens"]
    body = need(door.post("/detokenize", {"model": MODEL, "tokens": tokens}))
    require(body.get("prompt") == "a 123", "another shape")


def _responses(door: Door) -> None:
    asked = {"model": MODEL, "input": "Count", "max_output_tokens": 8, "temperature": 0}
    body = need(door.post("/v1/responses", asked))
    texts = [part["text"] for item in body["output"] for part in item.get("content") or []]
    require("".join(texts) == count(0, 8), f"it said {texts}")


def _responses_streamed(door: Door) -> None:
    asked = {"model": MODEL, "input": "Count", "max_output_tokens": 40, "temperature": 0}
    events = list(need_stream(door.stream("/v1/responses", asked)))
    deltas = [e["delta"] for e in events if e.get("type") == "response.output_text.delta"]
    require("".join(deltas) == count(0, 40), "text is lost or doubled")
    require(events[-1]["type"] in ("response.completed", "response.incomplete"), "it has no end")


def _responses_tools(door: Door) -> None:
    tool = {"type": "function", **TOOLS[0]["function"]}
    asked = {"model": MODEL, "input": "What is the weather?", "tools": [tool], "temperature": 0}
    body = need(door.post("/v1/responses", asked))
    calls = [item for item in body["output"] if item["type"] == "function_call"]
    require([_read(c["arguments"]).get("city") for c in calls] == [*CITIES], "calls are wrong")


def _messages(door: Door) -> None:
    asked = {"model": MODEL, "messages": COUNT, "max_tokens": 8, "temperature": 0}
    body = need(door.post("/v1/messages", asked))
    texts = [block.get("text", "") for block in body["content"]]
    require("".join(texts) == count(0, 8), f"it said {texts}")


def _messages_streamed(door: Door) -> None:
    asked = {"model": MODEL, "messages": COUNT, "max_tokens": 40, "temperature": 0}
    events = list(need_stream(door.stream("/v1/messages", asked)))
    deltas = [e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta"]
    require("".join(deltas) == count(0, 40), "text is lost or doubled")
    require(events[-1]["type"] == "message_stop", "it has no end")


def _messages_tools(door: Door) -> None:
    function = TOOLS[0]["function"]
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    asked = {"model": MODEL, "messages": WEATHER, "max_tokens": 400, "tools": [tool]}
    body = need(door.post("/v1/messages", {**asked, "temperature": 0}))
    calls = [block for block in body["content"] if block["type"] == "tool_use"]
    require([call["input"].get("city") for call in calls] == [*CITIES], "calls are wrong")


def _count_tokens(door: Door) -> None:
    body = need(door.post("/v1/messages/count_tokens", {"model": MODEL, "messages": COUNT}))
    require(body.get("input_tokens", 0) > 0, "no count")


def prompt_embeds(model: CountingModel) -> Callable[[Door], None]:
    """Return the probe for prompts that are vectors: those of one token, whose successors must follow."""

    def probe(door: Door) -> None:
        asked = {"model": MODEL, "max_tokens": 4, "temperature": 0}
        body = need(door.post(COMPLETIONS, {**asked, "prompt_embeds": _vectors(model, " 500")}))
        require(body["choices"][0]["text"] == count(501, 4), "ignored")

    return probe


def _vectors(model: CountingModel, text: str) -> str:
    """Return the embeddings of a text as vLLM takes them."""
    import base64
    import io

    import torch
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(model.folder / "tokenizer.json")).encode(text).ids
    width = json.loads((model.folder / "config.json").read_text())["hidden_size"]
    file = io.BytesIO()
    # Embeddings of the counting model are unit vectors.
    torch.save(torch.eye(width)[tokens], file)
    return base64.b64encode(file.getvalue()).decode()


FEATURES = (
    Feature("chat", _chat),
    Feature("chat, streamed", _chat_streamed),
    Feature("`stop`", _stop),
    Feature("tools, `tool_choice: auto`", _tools_auto),
    Feature("`tool_choice: required`", _tools_required),
    Feature("`tool_choice` with a name", _tools_named),
    Feature("several calls in one answer", _tools_parallel),
    Feature("`parallel_tool_calls: false`", _tools_not_parallel),
    Feature("calls streamed in deltas", _tools_streamed),
    Feature("history of calls, `content: null`", _tool_history),
    Feature("`response_format: json_schema`", _json_schema),
    Feature("`response_format: json_object`", _json_object),
    Feature("`n`", _n),
    Feature("`best_of`", _best_of),
    Feature("`echo`", _echo),
    Feature("`suffix`", _suffix),
    Feature("log probabilities, chat", _chat_logprobs),
    Feature("log probabilities, completions", _completion_logprobs),
    Feature("`/v1/embeddings` of a model that answers", _embeddings),
    Feature("`/tokenize`", _tokenize, compared=True),
    Feature("`/tokenize` of messages", _tokenize_messages, compared=True),
    Feature("`/detokenize`", _detokenize, compared=True),
    Feature("`/v1/responses`", _responses, translated=True),
    Feature("`/v1/responses`, streamed", _responses_streamed, translated=True),
    Feature("`/v1/responses` with tools", _responses_tools, translated=True),
    Feature("`/v1/messages`", _messages, translated=True),
    Feature("`/v1/messages`, streamed", _messages_streamed, translated=True),
    Feature("`/v1/messages` with tools", _messages_tools, translated=True),
    Feature("`/v1/messages/count_tokens`", _count_tokens, translated=True),
)
"""What one request shows; others need several, or a fleet (`runs`)."""


def try_feature(feature: Feature, door: Door, direct: Door | None) -> Mapping[str, str]:
    """Return the cell of a feature: `word` and perhaps `why`."""
    try:
        feature.probe(door)
    except Lacks as lack:
        return {"word": "no", "why": str(lack)}
    if feature.translated:
        return {"word": "translated"}
    if feature.compared and direct is not None:
        try:
            feature.probe(direct)
        except Lacks:
            return {"word": "translated"}
    return {"word": "yes"}
