"""Every field that asks for a form of the answer, and every field that is not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs the extra 'engine'")
pytest.importorskip("tokenizers", reason="needs the extra 'engine'")
pytest.importorskip("llguidance", reason="needs the extra 'engine'")

from atoll.core.request_parameters import FORMS, OutputFormat
from atoll.engine.engine_errors import EngineError
from atoll.engine.guidance import Matcher, MatcherFactory, check_guide
from atoll.runtime.instance import instance_requests as requests
from atoll.runtime.instance.answer_forms import read_form
from atoll.runtime.instance.choice_request import ParsedRequest
from atoll.runtime.instance.instance_requests import is_quick
from atoll.runtime.instance.request_fields import name_ignored
from atoll.runtime.openai import ApiError
from tests.runtime.instance.codecs import PlainCodec

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GBNF = 'root ::= "yes" | "no"'
LARK = 'start: "yes" | "no"'
WITH_FORM: list[dict[str, Any]] = [
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"json_schema": SCHEMA},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"guided_regex": "yes|no"},
    {"guided_choice": ["yes", "no (.*)"]},
    {"guided_grammar": LARK},
    {"grammar": GBNF},
    *({"structured_outputs": {"json": form}} for form in (SCHEMA, json.dumps(SCHEMA))),
    {"structured_outputs": {"regex": "yes|no"}},
    {"structured_outputs": {"choice": ["yes", "no (.*)"]}},
    {"structured_outputs": {"grammar": GBNF}},
    {"structured_outputs": {"json_object": True}},
]


def form_of(**more: Any) -> OutputFormat | None:
    fields = requests._read_extras(json.dumps(more).encode())
    asked = read_form(fields, fields.response_format or {})
    return None if asked is None else asked.guide


def read(**more: object) -> ParsedRequest:
    body = json.dumps({"model": "m", "prompt": "Hello"} | more).encode()
    return requests.read("/v1/completions", body, PlainCodec(), 100)


def chat(**more: object) -> ParsedRequest:
    messages = [{"role": "user", "content": "Hi"}]
    body = json.dumps({"model": "m", "messages": messages} | more).encode()
    return requests.read("/v1/chat/completions", body, PlainCodec(), 100)


@pytest.fixture(scope="module")
def matchers(tmp_path_factory: pytest.TempPathFactory) -> MatcherFactory:
    """Of a tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    folder: Path = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    return MatcherFactory(folder, len(letters) + 1, [len(letters)])


def takes(matcher: Matcher, matchers: MatcherFactory, text: str) -> bool:
    """Whether an answer may be this text and end after it."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(matchers.folder / "tokenizer.json"))
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        if matcher.done or not matcher.compute_allowed(matchers.vocabulary)[token]:
            return False
        matcher.feed([token])
    return matcher.done or bool(matcher.compute_allowed(matchers.vocabulary)[matchers.eos[0]])


@pytest.mark.parametrize("more", WITH_FORM, ids=lambda more: "-".join(map(str, more))[:40])
def test_all_fields_that_ask_for_a_form_are_obeyed(
    matchers: MatcherFactory, more: dict[str, Any]
) -> None:
    guide = form_of(**more)
    assert guide is not None
    check_guide(matchers, guide)
    (value,) = more.values()
    right, wrong = ("yes", "maybe")
    if guide.kind == "json_object" or "properties" in json.dumps(value).replace("\\", ""):
        right, wrong = '{"a": 1}', "yes"
    assert takes(matchers.matcher(guide), matchers, right)
    assert not takes(matchers.matcher(guide), matchers, wrong)
    if "choice" in str(more):
        assert takes(matchers.matcher(guide), matchers, "no (.*)")
        assert not takes(matchers.matcher(guide), matchers, "no (x)")


@pytest.mark.parametrize("text", ["start: %%", "root ::= undefined", "start: nowhere"])
def test_a_grammar_that_is_none_is_refused(matchers: MatcherFactory, text: str) -> None:
    with pytest.raises(EngineError, match="guide"):
        check_guide(matchers, OutputFormat(kind="grammar", text=text))


def test_no_form_is_asked_for_by_nothing() -> None:
    assert form_of() is None
    assert form_of(guided_regex="", grammar="", response_format={"type": "text"}) is None
    assert form_of(**dict.fromkeys(FORMS)) is None


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"grammar": GBNF, "response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            "structured_outputs",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            "structured_outputs",
        ),
        ({"structured_outputs": {"regex": 7}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "7"}, "guided_json"),
        ({"guided_choice": ["x" * 70_000]}, "guided_choice"),
    ],
)
def test_a_form_that_is_none_is_refused_by_its_name(more: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        form_of(**more)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("name", FORMS)
def test_no_form_is_compiled_between_tokens(name: str) -> None:
    assert not is_quick(json.dumps({name: "a"}).encode())


@pytest.mark.parametrize(
    "more",
    [
        {"use_beam_search": True},
        {"chat_template": "{{ messages }}"},
        {"bad_words": ["x"]},
        {"n_predict": 9},
        {"mirostat": 2},
        {"repeat_penalty": 1.3},
        {"guided_whitespace_pattern": " "},
    ],
)
def test_what_would_change_the_answer_is_never_left_out(more: dict[str, Any]) -> None:
    for ask in (read, chat):
        with pytest.raises(ApiError) as caught:
            ask(**more)
        assert (caught.value.status, caught.value.param) == (400, next(iter(more)))


def test_a_chat_has_no_prompt_to_show() -> None:
    with pytest.raises(ApiError) as caught:
        chat(echo=True)
    assert caught.value.param == "echo"
    assert chat(echo=False).ignored == ()
    assert form_of(structured_outputs={"choice": ["a"], "disable_fallback": False}) is not None


def test_what_changes_nothing_is_taken() -> None:
    more = {"use_beam_search": False, "bad_words": [], "mirostat": 0, "prompt_logprobs": None}
    assert read(**more).ignored == chat(**more).ignored == ()
    # Those that gateways add, and OpenAI's own.
    assert chat(return_token_ids=True, timings_per_token=True, user="me", seed=1).ignored == ()


def test_what_is_left_out_is_named_or_refused() -> None:
    more = {"store": True, "metadata": {"a": "b"}, "strict": False}
    assert chat(**more).ignored == ("metadata", "store")
    assert name_ignored(chat(**more).ignored) == (("x-atoll-ignored", "metadata, store"),)
    assert name_ignored(()) == ()
    with pytest.raises(ApiError) as caught:
        chat(**more | {"strict": True})
    assert (caught.value.status, caught.value.param) == (400, "store")
    with pytest.raises(ApiError) as caught:
        chat(strict="yes")
    assert caught.value.param == "strict"


def test_a_header_holds_no_more_than_names() -> None:
    ((_, line),) = name_ignored(["a\r\nx-evil: 1", "b" * 100, *(f"f{n}" for n in range(40))])
    assert "\n" not in line
    assert line.startswith("b" * 64 + ", f0")
    assert line.endswith("and 26 more")


def test_the_chat_template_is_told_what_the_client_says() -> None:
    told: dict[str, Any] = {}

    class Template:
        def render(self, **fields: Any) -> str:
            told.update(fields)
            return "x"

    codec = PlainCodec()
    codec._template = Template()
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    body |= {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
    requests.read("/v1/chat/completions", json.dumps(body).encode(), codec, 100)
    assert (told["enable_thinking"], told["reasoning_effort"]) == (False, "low")
    body["chat_template_kwargs"] = {"messages": []}
    with pytest.raises(ApiError) as caught:
        requests.read("/v1/chat/completions", json.dumps(body).encode(), codec, 100)
    assert caught.value.param == "chat_template_kwargs"
