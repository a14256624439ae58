"""Calls of every format: what is drawn by chance is valid, and is read the same however it comes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("zmq", reason="needs the extra 'engine'")
pytest.importorskip("llguidance", reason="needs the extra 'engine'")

from atoll.core.request_parameters import OutputFormat
from atoll.engine.guidance import check_guide
from atoll.engine.scheduler_core import TokenEvent
from atoll.engine.text import TextCodec
from atoll.runtime.gateway.events import Delivered, choices_of, payload, read_chunk, split_events
from atoll.runtime.gateway.resume import resume
from atoll.runtime.instance import instance_requests as requests
from atoll.runtime.instance.choice_request import ParsedRequest
from atoll.runtime.instance.instance_answers import ChoiceText, ResponseWriter
from atoll.runtime.instance.tools.call_formats import find_format
from atoll.runtime.instance.tools.functions import read_tools
from atoll.runtime.instance.tools.parser import CallParser
from atoll.runtime.openai import ApiError, ChatRequest, read_request
from tests.runtime.instance.tool_models import (
    ADD,
    LONGEST,
    MODELS,
    NOW,
    TOOLS,
    WEATHER,
    draw_answer,
    matchers,
    write_tool_model,
)
from tests.seeds import examples

Json = dict[str, Any]
CHAT = "/v1/chat/completions"
BOUNDED = examples(25)
names = st.sampled_from(sorted(MODELS))


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TextCodec]:
    made: dict[str, TextCodec] = {}

    def get(name: str) -> TextCodec:
        if name not in made:
            made[name] = write_tool_model(tmp_path_factory.mktemp(name), name)
        return made[name]

    return get


def body_of(**more: object) -> Json:
    asked: Json = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
    return {key: value for key, value in (asked | more).items() if value is not None}


def read(codec: TextCodec, **more: object) -> ParsedRequest:
    return requests.read(CHAT, json.dumps(body_of(**more)).encode(), codec, LONGEST)


def guide_of(parsed: ParsedRequest) -> OutputFormat:
    guide = parsed.choices[0].sampling.guide
    assert guide is not None
    return guide


def begin_of(codec: TextCodec, parsed: ParsedRequest, text: str = "") -> list[int]:
    """The tokens of an answer that says something and then begins to call."""
    form = parsed.choices[0].calls
    assert form is not None
    begun = "{" if form.syntax.first else text + form.syntax.mark
    return codec.encode(begun, special=False)


def events_of(tokens: list[int], start: int = 0) -> list[TokenEvent]:
    last = len(tokens) - 1
    return [
        TokenEvent("r", i, token=token, finish_reason="stop" if i == last else None)
        for i, token in enumerate(tokens)
    ][start:]


def streamed(parsed: ParsedRequest, codec: TextCodec, events: list[TokenEvent]) -> list[Json]:
    """The chunks of an answer to whose tokens nothing happens on the way."""
    writer = ResponseWriter(parsed, len(parsed.choices[0].prompt))
    choice = ChoiceText(0, parsed.choices[0], codec)
    data = writer.roles() + (writer.chunk(choice.owed()) if choice.finish else b"")
    for event in events:
        if choice.finish is None and (piece := choice.add(event)) is not None:
            data += writer.chunk(piece)
    chunks = [read_chunk(payload(event) or b"") for event in split_events(data)[0]]
    return [chunk for chunk in chunks if chunk is not None]


def gathered(chunks: list[Json]) -> Json:
    """A stream as a client has it in the end."""
    found: Json = {"content": "", "calls": [], "finish": None}
    for choice in (choice for chunk in chunks for choice in choices_of(chunk)):
        delta = choice["delta"]
        found["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(found["calls"]):
                assert call["type"] == "function"
                assert call["function"]["name"]
                found["calls"].append([call["id"], call["function"].pop("name"), ""])
            assert call["function"].keys() == {"arguments"}
            assert call["index"] == len(found["calls"]) - 1
            found["calls"][call["index"]][2] += call["function"]["arguments"]
        found["finish"] = choice["finish_reason"] or found["finish"]
    return found


def valid(name: str, written: str) -> bool:
    arguments = json.loads(written)
    schema = next(t["function"] for t in TOOLS if t["function"]["name"] == name)
    properties = schema.get("parameters", {}).get("properties", {})
    if set(arguments) != set(properties):
        return False
    if name == "get_weather":
        return arguments["city"] in properties["city"]["enum"] and 1 <= arguments["days"] <= 14
    return all(number in (1, 22, -3.5) for number in arguments.get("numbers", ()))


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_a_model_that_knows_nothing_makes_valid_calls(
    codecs: Callable[[str], TextCodec], name: str, choice: str
) -> None:
    codec = codecs(name)
    named = {"type": "function", "function": {"name": "add"}}
    parsed = read(codec, tool_choice=named if choice == "named" else choice)
    several = 0
    for seed in range(4):
        begin = begin_of(codec, parsed, "Sure. ") if choice == "auto" else []
        tokens = draw_answer(codec, guide_of(parsed), seed, begin=begin)
        found = gathered(streamed(parsed, codec, events_of(tokens)))
        assert found["finish"] == "tool_calls"
        assert found["content"] == ("Sure. " if choice == "auto" and name != "llama" else "")
        assert all(valid(called, written) for _, called, written in found["calls"])
        assert found["calls"]
        if choice == "named":
            assert [called for _, called, _ in found["calls"]] == ["add"]
        assert len({id_ for id_, _, _ in found["calls"]}) == len(found["calls"])
        several += len(found["calls"]) > 1
    assert several or choice == "named"


def test_without_parallel_calls_there_is_one(codecs: Callable[[str], TextCodec]) -> None:
    for name in sorted(MODELS):
        parsed = read(codecs(name), tool_choice="required", parallel_tool_calls=False)
        for seed in range(3):
            tokens = draw_answer(codecs(name), guide_of(parsed), seed)
            assert len(gathered(streamed(parsed, codecs(name), events_of(tokens)))["calls"]) == 1


def test_who_may_call_may_also_say_anything_or_nothing(
    codecs: Callable[[str], TextCodec],
) -> None:
    for name in sorted(MODELS):
        codec = codecs(name)
        parsed = read(codec)
        for text in ("", "a <tool_cal", "so [TOOL", "\u6c34 {1}"):
            tokens = [*codec.encode(text, special=False), codec.eos[0]]
            check_guide(matchers(codec), guide_of(parsed), tokens)
            found = gathered(streamed(parsed, codec, events_of(tokens)))
            assert found == {"content": text, "calls": [], "finish": "stop"}


def test_letters_that_look_like_a_mark_are_text_where_the_mark_is_a_token(
    codecs: Callable[[str], TextCodec],
) -> None:
    codec = codecs("hermes")
    parsed = read(codec)
    tokens = [t for letter in "<tool_call> is a mark" for t in codec.encode(letter, special=False)]
    found = gathered(streamed(parsed, codec, events_of(tokens)))
    assert found == {"content": "<tool_call> is a mark", "calls": [], "finish": "stop"}


def test_an_answer_that_is_cut_ends_as_such(codecs: Callable[[str], TextCodec]) -> None:
    codec = codecs("plain")
    parsed = read(codec, tool_choice="required", max_tokens=60)
    tokens = draw_answer(codec, guide_of(parsed), 1)[:60]
    events = [*events_of(tokens)[:-1], TokenEvent("r", 59, tokens[-1], finish_reason="length")]
    found = gathered(streamed(parsed, codec, events))
    assert found["finish"] == "length"
    stopped = read(codec, tool_choice="required", stop="argu")
    found = gathered(streamed(stopped, codec, events_of(tokens)))
    assert found["finish"] == "stop"


def test_a_whole_answer_has_calls_and_no_content(codecs: Callable[[str], TextCodec]) -> None:
    codec = codecs("mistral")
    parsed = read(codec, tool_choice="required", n=2)
    tokens = draw_answer(codec, guide_of(parsed), 0)
    answers = []
    for index, choice in enumerate(parsed.choices):
        reader = ChoiceText(index, choice, codec)
        answers.append([p for e in events_of(tokens) if (p := reader.add(e)) is not None])
    whole = json.loads(ResponseWriter(parsed, 1).whole(answers, 2 * len(tokens)))
    first, second = (choice["message"] for choice in whole["choices"])
    assert first["content"] is None
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    stream = gathered(streamed(parsed, codec, events_of(tokens)))
    assert [
        [c["id"], c["function"]["name"], c["function"]["arguments"]] for c in first["tool_calls"]
    ] == stream["calls"]
    assert {c["id"] for c in first["tool_calls"]}.isdisjoint(c["id"] for c in second["tool_calls"])


def test_json_or_calls(codecs: Callable[[str], TextCodec]) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    codec = codecs("plain")
    parsed = read(codec, response_format=form)
    for text in ('{"a": 1}', '<tool_call>{"name": "now", "arguments": {}}</tool_call>'):
        check_guide(matchers(codec), guide_of(parsed), codec.encode(text, special=False))
    with pytest.raises(ApiError, match="beside tools"):
        read(codecs("llama"), response_format=form)
    with pytest.raises(ApiError, match="beside tools"):
        read(codec, guided_regex="a+")


pieces = st.lists(st.integers(1, 9), min_size=1, max_size=30)
texts = st.text(alphabet='ab <>_[]tolcTOLC"{}\\\n\u6c34', max_size=20)
argument_values = st.dictionaries(
    texts, st.one_of(texts, st.integers(), st.lists(texts)), max_size=3
)


@given(
    names, texts, st.lists(st.tuples(st.sampled_from(["f", "get_x-1"]), argument_values)), pieces
)
@BOUNDED
def test_any_split_of_an_answer_gives_the_same_calls(
    codecs: Callable[[str], TextCodec],
    name: str,
    text: str,
    made: list[tuple[str, Json]],
    sizes: list[int],
) -> None:
    form = find_format(codecs(name))
    if text.startswith("{") or (text and form.syntax.first):
        text = ""
    written = [(called, json.dumps(arguments)) for called, arguments in made]
    whole = text + (form.write(written) if written else "")
    parser = CallParser(form.syntax, tokens=not form.syntax.mark or name == "llama")
    said, calls, at, turn = "", list[list[str]](), 0, 0
    while at < len(whole):
        delta = parser.feed(whole[at : at + sizes[turn % len(sizes)]])
        at, turn = at + sizes[turn % len(sizes)], turn + 1
        said += delta.text
        for call in delta.calls:
            if call.name is not None:
                calls.append([call.name, ""])
            assert call.index == len(calls) - 1
            calls[call.index][1] += call.arguments
    said += parser.finish()
    assert said == text
    assert [tuple(call) for call in calls] == written
    assert parser.between


@given(names, st.integers(0, 5), st.booleans(), st.lists(st.floats(0, 1), min_size=1, max_size=3))
@examples(40)
def test_a_stream_that_breaks_off_anywhere_goes_on_byte_for_byte(
    codecs: Callable[[str], TextCodec], name: str, seed: int, talks: bool, cuts: list[float]
) -> None:
    codec = codecs(name)
    asked = body_of(stream=True, tool_choice="auto" if talks else "required", temperature=1)
    body = json.dumps(asked).encode()
    parsed = requests.read(CHAT, body, codec, LONGEST)
    begin = begin_of(codec, parsed, "Let me \u6c34 see") if talks else []
    tokens = draw_answer(codec, guide_of(parsed), seed, begin=begin)
    undisturbed = streamed(parsed, codec, events_of(tokens))

    request = read_request(CHAT, body)
    assert isinstance(request, ChatRequest)
    delivered, chunks, received = Delivered(), undisturbed, list[Json]()
    for cut in cuts:
        for chunk in chunks[: int(cut * len(chunks))]:
            delivered.add(chunk)
            received.append(chunk)
        resumption = resume(request, body, delivered, "atoll")
        assert resumption is not None
        known = delivered.answers[0].tokens if delivered.answers else 0
        again = requests.read(CHAT, resumption.body, codec, LONGEST)
        assert list(again.choices[0].generated) == tokens[:known]
        chunks = [
            kept
            for chunk in streamed(again, codec, events_of(tokens, known))
            if (kept := resumption.rewriter.chunk(chunk)) is not None
        ]
    for chunk in chunks:
        delivered.add(chunk)
        received.append(chunk)
    whole = Delivered()
    for chunk in undisturbed:
        whole.add(chunk)
    assert delivered.answers[0].strings == whole.answers[0].strings
    assert delivered.answers[0].token_ids == tokens
    assert gathered(received) == gathered(streamed(parsed, codec, events_of(tokens)))


def test_what_another_engine_called_goes_on_from_its_text(
    codecs: Callable[[str], TextCodec],
) -> None:
    for name in sorted(MODELS):
        codec = codecs(name)
        said = "" if name == "llama" else "Well. "
        calls = [{"name": "now", "arguments": "{}"}, {"name": "add", "arguments": '{"numbers": [2'}]
        again = read(codec, atoll={"resume": {"text": said, "tokens": 9, "calls": calls}})
        begin = list(again.choices[0].generated)
        tokens = draw_answer(codec, guide_of(again), 3, begin=begin)
        reader = streamed(again, codec, events_of(tokens, len(begin)))
        pieces = [
            (call["index"], call["function"]["arguments"])
            for chunk in reader
            for choice in choices_of(chunk)
            for call in choice["delta"].get("tool_calls", ())
        ]
        assert pieces[0] == (1, "2")
        assert "id" not in reader[1]["choices"][0]["delta"]["tool_calls"][0]
    with pytest.raises(ApiError, match="cannot be followed") as caught:
        read(codecs("plain"), atoll={"resume": {"calls": [{"name": "f", "arguments": "{]"}]}})
    assert caught.value.param == "atoll.resume"


def function(**more: object) -> Json:
    return {"type": "function", "function": {"name": "f"} | more}


def nested(levels: int) -> Json:
    schema: Json = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [NOW, function(name="a b")]}, "tools[1].function.name"),
        ({"tools": [function(name="x" * 65)]}, "tools[0].function.name"),
        ({"tools": [function(name="caf\u00e9")]}, "tools[0].function.name"),
        ({"tools": [function(), NOW, function()]}, "tools[2].function.name"),
        ({"tools": [function(name=f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [function(description=7)]}, "tools[0].function.description"),
        ({"tools": [function(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [function(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [function(parameters={"type": "string"})]}, "tools[0].function.parameters.type"),
        ({"tools": [function(parameters=nested(40))]}, "tools[0].function.parameters"),
        (
            {"tools": [function(parameters={"enum": ["x" * 70_000]})]},
            "tools[0].function.parameters",
        ),
        ({"tools": [function(parameters={"properties": {"a": {"type": "poem"}}})]}, "tools"),
        (
            {"tools": [function(parameters={"$ref": "http://localhost/schema.json"})]},
            "tools",
        ),
        (
            {
                "tools": [
                    function(
                        name=f"f{i}", parameters={"properties": {"a": {"enum": ["y" * 30_000]}}}
                    )
                    for i in range(5)
                ]
            },
            "tools",
        ),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"messages": [{"role": "poet", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].name"),
        ({"tools": None, "functions": [{"name": "f"}], "function_call": "any"}, "function_call"),
        ({"tools": None, "function_call": "auto"}, "function_call"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (
            {"messages": [{"role": "tool", "tool_call_id": "c", "content": "x"}]},
            "messages[0].tool_call_id",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": {"arguments": "{}"}}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "[1]"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_is_wrong_with_tools_is_named(
    codecs: Callable[[str], TextCodec], fields: Json, param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        read(codecs("plain"), **fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert "\n" not in caught.value.message


def test_forms_that_nothing_can_have_are_refused(codecs: Callable[[str], TextCodec]) -> None:
    for schema in (
        {"type": "poem"},
        {"type": "string", "pattern": "[a-"},
        nested(100),
        nested(400),
        {"$ref": "file:///etc/passwd"},
        {"$ref": "http://10.0.0.1/schema"},
    ):
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        with pytest.raises(ApiError) as caught:
            read(codecs("plain"), tools=None, response_format=form)
        assert caught.value.status == 400
    for more in (
        {"guided_regex": "("},
        {"guided_regex": "(" * 1000},
        {"guided_regex": "[a-"},
        {"guided_regex": "(?=a)b"},
        {"grammar": "root ::= nowhere"},
    ):
        with pytest.raises(ApiError) as caught:
            read(codecs("plain"), tools=None, **more)
        assert caught.value.param == next(iter(more))


HISTORY: list[Json] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Oslo and now?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city":"Oslo","days":1}'},
            },
            {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
]


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral", "mistral-args"])
def test_templates_that_know_calls_get_them_as_objects(
    codecs: Callable[[str], TextCodec], name: str
) -> None:
    codec = codecs(name)
    prompt = codec.decode(read(codec, messages=HISTORY).choices[0].prompt, skip_special=False)
    assert '{"city": "Oslo", "days": 1}' in prompt
    assert "None" not in prompt
    assert prompt.count("<|tool|>") == 2
    assert prompt.startswith("<tools>")


def test_other_templates_are_told_of_calls_and_tools(codecs: Callable[[str], TextCodec]) -> None:
    codec = codecs("plain")
    prompt = codec.decode(read(codec, messages=HISTORY).choices[0].prompt, skip_special=False)
    assert prompt.startswith("<|system|>Be brief.\n\nYou can call functions.")
    assert json.dumps(WEATHER["function"]["name"]) in prompt
    assert '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 1}}' in prompt
    assert (
        "<|user|><tool_response>\nrain\n</tool_response>\n\n"
        "<tool_response>\nnoon\n</tool_response><|end|>" in prompt
    )
    without = codec.decode(
        read(codec, messages=HISTORY, tool_choice="none").choices[0].prompt, skip_special=False
    )
    assert "You can call" not in without
    assert "<tool_response>" in without
    shy = codecs("no-system")
    prompt = shy.decode(read(shy).choices[0].prompt, skip_special=False)
    assert prompt.startswith("<|user|>You can call functions.")


def test_none_is_no_tools(codecs: Callable[[str], TextCodec]) -> None:
    parsed = read(codecs("hermes"), tool_choice="none")
    assert parsed.choices[0].sampling.guide is None
    assert parsed.choices[0].calls is None
    assert read(codecs("hermes"), tools=None).choices[0].prompt == parsed.choices[0].prompt


def test_what_only_people_read_does_not_count(codecs: Callable[[str], TextCodec]) -> None:
    prose = {"description": "x" * 60_000, "type": "string"}
    parameters = {"properties": {"description": prose, "title": {"type": "string"}}}
    tools = [function(name=f"f{i}", parameters=parameters) for i in range(3)] + [ADD]
    codec = codecs("plain")
    with pytest.raises(ApiError) as caught:
        requests.read(CHAT, json.dumps(body_of(tools=tools)).encode(), codec, 300)
    assert caught.value.code == "context_length_exceeded"
    use = read_tools(tools, "auto", None)
    assert use is not None
    guide = find_format(codec).grammar(use)
    assert len(guide) < 4000
    assert '"description": {"type": "string"}' in guide
