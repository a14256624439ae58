"""Behaviours that clients of others need of a server, a check for each, named after the client that needs it.

A check asks a gateway with the client itself where that is a Python package (`openai`, `anthropic`), else as
that client asks. What it must find was found with the client's own tests (docs/clients.md).
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import anthropic
    import openai

Json = dict[str, Any]
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
PROMPT = "The tide comes in and goes out again, twice a day, and the atoll stays."
ORIGIN = "https://app.example"
"""Whose pages may ask: the gateway must be told so."""
_LONG = "many words " * 4000
_AGAIN = 6
"""So often a prompt is asked: a node that knows it is met, however many there are."""
_LOOK: Json = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"what": {"enum": ["sea", "sky"]}},
        "required": ["what"],
    },
}
_SCHEMA: Json = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}


class HttpAnswer(NamedTuple):
    """Answer to a request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """What it says."""
        return json.loads(self.body)

    @property
    def chunks(self) -> list[Json]:
        """What its events say, but for the end mark."""
        events = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        return [json.loads(event) for event in events if event != "[DONE]"]


@dataclass(frozen=True)
class ClientSite:
    """A gateway in front of the stage engine, and a model that it serves."""

    url: str
    model: str

    def ask(
        self, path: str, body: Json | None = None, method: str | None = None, **headers: str
    ) -> HttpAnswer:
        """Return the answer to a request, whatever its status is."""
        data = None if body is None else json.dumps({"model": self.model} | body).encode()
        request = urllib.request.Request(
            self.url + path, data, {k.replace("_", "-"): v for k, v in headers.items()}
        )
        request.method = method or ("GET" if body is None else "POST")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return HttpAnswer(answer.status, dict(answer.headers), answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return HttpAnswer(error.code, dict(error.headers), error.read())

    def complete(self, **more: Any) -> Json:
        """Return the whole answer to a prompt."""
        answer = self.ask(
            COMPLETIONS, {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **more}
        )
        assert answer.status == 200, answer.body
        found: Json = answer.json
        return found

    def chat(self, **more: Any) -> HttpAnswer:
        """Return the answer to a conversation."""
        messages = [{"role": "user", "content": PROMPT}]
        return self.ask(CHAT, {"messages": messages, "max_tokens": 8, "temperature": 0, **more})

    @contextmanager
    def openai(self) -> Iterator[openai.OpenAI]:
        """Open OpenAI's client."""
        import openai

        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="x", max_retries=0) as client:
            yield client

    @contextmanager
    def anthropic(self) -> Iterator[anthropic.Anthropic]:
        """Open Anthropic's client."""
        import anthropic

        with anthropic.Anthropic(base_url=self.url, api_key="x", max_retries=0) as client:
            yield client


# Anthropic's client, and others that speak its dialect


def anthropic_counts_at_the_start(site: ClientSite) -> None:
    """A stream says at its start what the prompt took, as the counted tokens of the same request."""
    asked: Any = {"model": site.model, "messages": [{"role": "user", "content": PROMPT}]}
    with site.anthropic() as client:
        counted = client.messages.count_tokens(**asked).input_tokens
        with client.messages.stream(**asked, max_tokens=4) as stream:
            begun = next(event for event in stream if event.type == "message_start")
            end = stream.get_final_message()
        for usage in (begun.message.usage, end.usage):
            assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted > 0, usage


def anthropic_cached_tokens(site: ClientSite) -> None:
    """What is known of a prompt is told apart from what was computed."""
    asked: Any = {"model": site.model, "messages": [{"role": "user", "content": 4 * PROMPT}]}
    with site.anthropic() as client:
        counted = client.messages.count_tokens(**asked).input_tokens
        usages = [client.messages.create(**asked, max_tokens=1).usage for _ in range(_AGAIN)]
    assert all(u.input_tokens + (u.cache_read_input_tokens or 0) == counted for u in usages)
    assert any(usage.cache_read_input_tokens for usage in usages), usages


def anthropic_stop_sequence(site: ClientSite) -> None:
    """A stop sequence is the reason, and is named."""
    text = site.complete()["choices"][0]["text"]
    with site.anthropic() as client:
        found = client.messages.create(
            model=site.model,
            max_tokens=8,
            messages=[{"role": "user", "content": PROMPT}],
            stop_sequences=["never", text[4]],
            extra_body={"temperature": 0},
        )
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", text[4]), found


def anthropic_context_overflow(site: ClientSite) -> None:
    """A prompt that is too long is refused in Anthropic's words as well, at which agents shorten it."""
    import anthropic

    asked: Any = {"model": site.model, "messages": [{"role": "user", "content": _LONG}]}
    refused: list[anthropic.BadRequestError] = []
    with site.anthropic() as client:
        try:
            client.messages.create(**asked, max_tokens=1)
        except anthropic.BadRequestError as error:
            refused.append(error)
    assert refused
    assert "prompt is too long: this model's maximum context length is" in str(refused[0])


def vercel_ai_no_null_citations(site: ClientSite) -> None:
    """Blocks of plain text have no `citations`: Vercel's provider refuses null."""
    asked: Json = {"max_tokens": 4, "messages": [{"role": "user", "content": PROMPT}]}
    asked["temperature"] = 0
    version = {"anthropic_version": "2023-06-01"}
    whole = site.ask(MESSAGES, asked, **version).json
    (block,) = whole["content"]
    assert block.keys() == {"type", "text"}, block
    streamed = site.ask(MESSAGES, asked | {"stream": True}, **version).chunks
    opened = [event["content_block"] for event in streamed if "content_block" in event]
    assert opened == [{"type": "text", "text": ""}], opened


# OpenAI's client, and those that wrap it


def openai_cached_tokens(site: ClientSite) -> None:
    """The usage says how many tokens of the prompt were cached."""
    with site.openai() as client:
        usages = [
            client.completions.create(model=site.model, prompt=5 * PROMPT, max_tokens=1).usage
            for _ in range(_AGAIN)
        ]
    details = [None if usage is None else usage.prompt_tokens_details for usage in usages]
    assert any(detail.cached_tokens for detail in details if detail is not None), details


def openai_legacy_functions(site: ClientSite) -> None:
    """Functions as they were before tools: asked for, streamed, and answered."""
    asked: Any = {
        "model": site.model,
        "messages": [{"role": "user", "content": "Look!"}],
        "functions": [_LOOK],
        "function_call": {"name": "look"},
        "max_tokens": 200,
        "temperature": 0,
    }
    with site.openai() as client:
        whole = client.chat.completions.create(**asked).choices[0]
        call = whole.message.function_call
        assert whole.finish_reason == "function_call"
        assert call is not None
        assert call.name == "look"
        assert json.loads(call.arguments)["what"] in ("sea", "sky")
        assert whole.message.tool_calls is None
        deltas = [
            chunk.choices[0].delta.function_call
            for chunk in client.chat.completions.create(**asked, stream=True)
            if chunk.choices and chunk.choices[0].delta.function_call
        ]
        assert "".join(delta.arguments or "" for delta in deltas) == call.arguments
        asked["messages"] += [
            {"role": "assistant", "content": None, "function_call": call.model_dump()},
            {"role": "function", "name": "look", "content": "blue"},
        ]
        client.chat.completions.create(**asked | {"function_call": "none", "max_tokens": 4})


def openai_models_say_their_length(site: ClientSite) -> None:
    """The list of models says how long a context may be, what it is made of, and whose it is."""
    with site.openai() as client:
        found = client.models.retrieve(site.model)
    extra = found.model_extra or {}
    assert extra["max_model_len"] > 0
    assert extra["root"] == site.model
    assert found.owned_by == "atoll"


def langchain_context_overflow(site: ClientSite) -> None:
    """A prompt that is too long is refused in the words that LangChain, LiteLLM and agents look for."""
    import openai

    refused: list[openai.BadRequestError] = []
    with site.openai() as client:
        try:
            client.chat.completions.create(
                model=site.model, messages=[{"role": "user", "content": _LONG}]
            )
        except openai.BadRequestError as error:
            refused.append(error)
    assert refused
    assert refused[0].code == "context_length_exceeded"
    assert "maximum context length is" in str(refused[0])


def langchain_usage_once(site: ClientSite) -> None:
    """A stream says its usage once: LangChain adds up what it finds."""
    found = site.chat(stream=True, stream_options={"include_usage": True}).chunks
    assert [bool(chunk.get("usage")) for chunk in found] == [False] * (len(found) - 1) + [True]


# The tests of vLLM's server


def vllm_pages(site: ClientSite) -> None:
    """/version, /ping, /load and /tokenizer_info are there."""
    assert site.ask("/version").json["version"]
    assert site.ask("/ping").status == site.ask("/ping", method="POST").status == 200
    assert site.ask("/load").json == {"server_load": 0}
    told = site.ask("/tokenizer_info").json
    assert told["chat_template"]
    assert "tokenizer_class" in told
    assert site.ask("/tokenizer_info?model=none").status == 404


def vllm_prompt_logprobs(site: ClientSite) -> None:
    """How likely the tokens of a prompt are, by their ids; not in a stream."""
    found = site.complete(prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    ids = site.ask("/tokenize", {"prompt": PROMPT}).json["tokens"]
    assert found[0] is None
    assert len(found) == len(ids)
    for token, scores in zip(ids[1:], found[1:], strict=True):
        assert str(token) in scores
        assert 2 <= len(scores) <= 3
        assert {score["rank"] for score in scores.values()} >= {1, 2}
    chat = site.chat(prompt_logprobs=0).json["prompt_logprobs"]
    assert [len(scores) for scores in chat[1:]] == [1] * (len(chat) - 1)
    assert site.chat(prompt_logprobs=0, stream=True).status == 400
    assert site.chat(prompt_logprobs=-2).status == 400


def vllm_token_ids(site: ClientSite) -> None:
    """The tokens of prompt and answer, whole and streamed."""
    ids = site.ask("/tokenize", {"prompt": PROMPT}).json["tokens"]
    choice = site.complete(return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == ids
    assert len(choice["token_ids"]) == 8
    assert "prompt_token_ids" not in site.complete()["choices"][0]
    chat = site.chat(return_token_ids=True).json
    assert chat["prompt_token_ids"] == ids
    streamed = site.chat(return_token_ids=True, stream=True).chunks
    assert streamed[0]["prompt_token_ids"] == ids
    assert not any("prompt_token_ids" in chunk for chunk in streamed[1:])
    made = [
        token for chunk in streamed for c in chunk["choices"] for token in c.get("token_ids", ())
    ]
    assert made == chat["choices"][0]["token_ids"]


def vllm_continuous_usage(site: ClientSite) -> None:
    """Every event of a stream says what was used by then, if that is asked for."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = site.chat(stream=True, stream_options=options).chunks
    made = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert made == sorted(made)
    assert made[-1] == 8
    assert len({chunk["usage"]["prompt_tokens"] for chunk in found}) == 1


def vllm_zero_logprobs(site: ClientSite) -> None:
    """With `logprobs: 0` the token itself is listed, and nothing else."""
    found = site.complete(logprobs=0)["choices"][0]["logprobs"]
    assert [list(top) for top in found["top_logprobs"]] == [[token] for token in found["tokens"]]
    some = site.complete(logprobs=5)["choices"][0]["logprobs"]
    assert all(5 <= len(top) <= 6 for top in some["top_logprobs"])


def vllm_stop_reason(site: ClientSite) -> None:
    """A choice says which stop string, or which token that was named, ended it."""
    choice = site.complete()["choices"][0]
    assert choice["stop_reason"] is None
    text, token = choice["text"], choice["token_ids"][3]
    assert site.complete(stop=[text[4]])["choices"][0]["stop_reason"] == text[4]
    assert site.complete(stop_token_ids=[token])["choices"][0]["stop_reason"] == token


def vllm_continues_the_final_message(site: ClientSite) -> None:
    """The last message goes on; to begin an answer as well is refused."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcd"}]
    more: Json = {"messages": messages, "continue_final_message": True}
    assert site.chat(**more, add_generation_prompt=True).status == 400
    found = site.chat(**more, add_generation_prompt=False, return_token_ids=True)
    assert found.status == 200
    assert len(found.json["prompt_token_ids"]) == 4


def vllm_structured_outputs(site: ClientSite) -> None:
    """Forms that are asked for are kept, and those that are none are refused."""
    kept: dict[str, Any] = {
        "choice": ["yes", "no"],
        "regex": "[ab]{3}",
        "json": _SCHEMA,
        "grammar": 'root ::= "p" | "q"',
    }
    for name, form in kept.items():
        answer = site.chat(structured_outputs={name: form}, max_tokens=30)
        text = answer.json["choices"][0]["message"]["content"]
        if name == "json":
            assert json.loads(text)["a"] in ("x", "y")
        else:
            assert text in ("yes", "no", "p", "q") or set(text) <= set("ab"), (name, text)
    refused: tuple[Json, ...] = ({"regex": "[a"}, {"grammar": "root ::= nothing"}, {"choice": []})
    for wrong in refused:
        assert site.chat(structured_outputs=wrong).status == 400, wrong


# The tests of llama.cpp's server


def llamacpp_grammar(site: ClientSite) -> None:
    """A grammar is obeyed, one that cannot be read is refused."""
    text = site.complete(grammar='root ::= "left" | "right"', max_tokens=20)["choices"][0]["text"]
    assert text in ("left", "right")
    for wrong in ("root ::= (", "root ::= undefined", "root = "):
        assert site.ask(COMPLETIONS, {"prompt": "a", "grammar": wrong}).status == 400, wrong


def llamacpp_json_schema(site: ClientSite) -> None:
    """A schema beside the prompt is obeyed."""
    text = site.complete(json_schema=_SCHEMA, max_tokens=60)["choices"][0]["text"]
    assert json.loads(text)["a"] in ("x", "y")


# lm-eval, and browsers


def lm_eval_scores_prompts(site: ClientSite) -> None:
    """A prompt is shown with how likely its tokens are, and no more."""
    found = site.complete(echo=True, logprobs=1, max_tokens=0)["choices"][0]["logprobs"]
    assert found["token_logprobs"][0] is None
    assert "".join(found["tokens"]) == PROMPT
    assert all(found["tokens"][n] in top for n, top in enumerate(found["top_logprobs"]) if top)


def browser_may_ask(site: ClientSite) -> None:
    """Pages of an origin that was named may ask, others may not."""
    asked = {"access_control_request_method": "POST"}
    allowed = site.ask(CHAT, None, "OPTIONS", origin=ORIGIN, **asked)
    assert allowed.status == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    other = site.ask("/v1/models", origin="https://elsewhere.example")
    assert "access-control-allow-origin" not in other.headers


CHECKS: tuple[Callable[[ClientSite], None], ...] = (
    anthropic_counts_at_the_start,
    anthropic_cached_tokens,
    anthropic_stop_sequence,
    anthropic_context_overflow,
    vercel_ai_no_null_citations,
    openai_cached_tokens,
    openai_legacy_functions,
    openai_models_say_their_length,
    langchain_context_overflow,
    langchain_usage_once,
    vllm_pages,
    vllm_prompt_logprobs,
    vllm_token_ids,
    vllm_continuous_usage,
    vllm_zero_logprobs,
    vllm_stop_reason,
    vllm_continues_the_final_message,
    vllm_structured_outputs,
    llamacpp_grammar,
    llamacpp_json_schema,
    lm_eval_scores_prompts,
    browser_may_ask,
)
