"""OpenAI's requests, as what the engine is asked.

Beside OpenAI's fields, those of vLLM that the engine knows are read (`top_k`, `min_p`,
`repetition_penalty`, `ignore_eos`, `stop_token_ids`, `prompt_logprobs`, `return_token_ids`,
`continue_final_message`), and `atoll.resume`: the part of an answer that was given elsewhere, as tokens or,
failing that, as text. Messages may hold vectors in place of text, in parts of the type `embeds` (`vectors`).
Tools are read in `tools`, forms in `answer_forms`, and what is not known is judged in `request_fields`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from atoll.core.errors import AtollError
from atoll.core.request_parameters import (
    FORMS,
    MAX_SEED,
    InstanceParameters,
    NonNegative,
    OutputFormat,
    SamplingParams,
    engine_values,
)
from atoll.engine.embeds import PromptEmbeds
from atoll.engine.engine_errors import TextTooLongError
from atoll.engine.prompts import chat_prompt
from atoll.engine.text import TEMPLATE_FIELDS, TextCodec
from atoll.runtime.instance.answer_forms import check_form, guide_calls, read_form
from atoll.runtime.instance.choice_request import ChoiceRequest, ParsedRequest
from atoll.runtime.instance.completion_options import (
    as_completion,
    best_of,
    check_completion,
    fill_in,
    score_prompt,
)
from atoll.runtime.instance.request_fields import check_fields
from atoll.runtime.instance.tools.call_formats import CallFormat, GenericFormat, find_format
from atoll.runtime.instance.tools.call_history import (
    adapt_messages,
    describe_tools,
    has_calls,
    read_messages,
)
from atoll.runtime.instance.tools.functions import ToolUse, read_functions, read_tools
from atoll.runtime.instance.vectors import read_vectors
from atoll.runtime.openai import ApiError, ChatRequest, CompletionRequest, read_request

MAX_CHOICES = 16
# Longer names in `logit_bias` are not even read as numbers.
_MAX_DIGITS = 20
_LARGE_BYTES = 2**20
_SPARE_PARTS = 2**19
COMPLETION_TOKENS = 16
"""Tokens that /v1/completions generates without `max_tokens`, as OpenAI has it."""


class ResumedCall(Struct):
    """A call of the answer so far."""

    name: str = ""
    arguments: str = ""


class ResumeField(Struct):
    """The answer so far; `token_ids` are exact, `text` and `calls` are taken where they are missing."""

    text: str = ""
    tokens: NonNegative = 0
    token_ids: list[NonNegative] | None = None
    calls: list[ResumedCall] | None = None


class AtollField(Struct):
    """Field that gateways of Atoll add to a request."""

    resume: ResumeField | None = None


class _Extras(InstanceParameters, kw_only=True):
    """Fields that are read beside those of the gateway, with the parameters declared for the instance."""

    response_format: dict[str, Any] | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    parallel_tool_calls: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    atoll: AtollField | None = None


_EXTRAS = msgspec.json.Decoder(_Extras)


def read(path: str, body: bytes, codec: TextCodec, max_length: int) -> ParsedRequest:
    """Read a request to /v1/chat/completions or /v1/completions; what is wrong is an ApiError.

    Takes long where the prompt is long: large bodies are read in a thread of their own. What cannot fit
    into `max_length` tokens is refused before, or soon after, it is tokenised.
    """
    # Lists of millions of tokens or texts keep every other thread waiting while they are decoded.
    max_parts = MAX_CHOICES * max_length + _SPARE_PARTS
    if len(body) > _LARGE_BYTES and body.count(b",") > max_parts:
        raise _too_long(f"the request has more than {max_parts} parts", "prompt", max_length)
    request = read_request(path, body)
    assert isinstance(request, ChatRequest | CompletionRequest)
    extras = _read_extras(body)
    ignored = check_fields(body, {*request.__struct_fields__, *extras.__struct_fields__})
    check_limits(request, extras.min_tokens)
    is_chat = isinstance(request, ChatRequest)
    # Tools come before the prompt: the template and the guide depend on them.
    use = _tools(request, extras)
    form = None if use is None else find_format(codec)
    asked = read_form(extras, extras.response_format or {})
    if use is not None and form is not None:
        asked = guide_calls(asked, use, form)
    guide = None if asked is None else asked.guide
    if is_chat:
        prompt, embeds = _chat_prompt(extras, codec, max_length, use, form)
        prompts = [prompt]
    else:
        assert isinstance(request, CompletionRequest)
        check_completion(request)
        prompts, embeds = _prompts(request, codec, max_length), None
        if request.suffix:
            filled = fill_in(prompts, request.suffix, request.model, codec, max_length)
            prompts = filled.prompts
            request.stop_token_ids = [*(request.stop_token_ids or ()), *filled.ends]
    count = best_of(request)
    choices = [
        _choice(request, extras, prompt, codec, max_length, number, embeds, guide)
        for prompt in prompts
        for number in range(count)
    ]
    if isinstance(request, CompletionRequest):
        choices = [
            as_completion(request, choice, number // count, codec)
            for number, choice in enumerate(choices)
        ]
    if asked is not None:
        check_form(asked, codec)
    choices = [replace(choice, calls=form) for choice in choices]
    _score_prompts(choices, count, extras.prompt_logprobs, stream=bool(request.stream))
    if len(choices) > MAX_CHOICES:
        raise _too_many()
    if extras.atoll is not None and extras.atoll.resume is not None:
        if len(choices) != 1:
            raise ApiError(400, "only a single answer can be resumed", param="atoll.resume")
        choices = [_resume_choice(choices[0], extras.atoll.resume, codec, max_length)]
        if asked is not None:
            check_form(asked, codec, choices[0].generated)
    options = request.stream_options
    return ParsedRequest(
        model=request.model,
        is_chat=is_chat,
        stream=bool(request.stream),
        include_usage=bool(getattr(options, "include_usage", False)),
        logprobs=request.logprobs is not None and request.logprobs is not False,
        choices=tuple(choices),
        best_of=count,
        n=request.n or 1,
        counts=bool(getattr(options, "continuous_usage_stats", False)),
        prompt_ids=bool(extras.return_token_ids),
        legacy=isinstance(request, ChatRequest) and bool(request.functions),
        ignored=ignored,
    )


def _read_extras(body: bytes) -> _Extras:
    try:
        return _EXTRAS.decode(body)
    except msgspec.ValidationError as error:
        raise ApiError(400, str(error)) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None


def _tools(request: ChatRequest | CompletionRequest, extras: _Extras) -> ToolUse | None:
    """Return what a request may call, in today's words or in those before there were tools."""
    if not isinstance(request, ChatRequest):
        return None
    if request.functions is None and request.function_call is None:
        return read_tools(request.tools, request.tool_choice, extras.parallel_tool_calls)
    if request.tools:
        param = "functions" if request.functions else "function_call"
        raise ApiError(400, "functions are an older name of tools: give either", param=param)
    return read_functions(request.functions, request.function_call)


def _score_prompts(
    choices: list[ChoiceRequest], count: int, top: int | None, *, stream: bool
) -> None:
    if top is None:
        return
    if stream:
        message = "prompt_logprobs come with a whole answer: they cannot be streamed"
        raise ApiError(400, message, param="prompt_logprobs")
    # Answers to one prompt stand side by side: it is read once.
    choices[::count] = [score_prompt(choice, top) for choice in choices[::count]]


def _too_many() -> ApiError:
    return ApiError(400, f"at most {MAX_CHOICES} answers a request", param="n")


def _too_long(message: str, param: str, max_length: int) -> ApiError:
    # In the words of OpenAI's servers: LiteLLM, LangChain and agents look for them, and shorten the prompt.
    said = f"this model's maximum context length is {max_length} tokens: {message}"
    return ApiError(400, said, param=param, code="context_length_exceeded")


def _too_many_tokens(count: int, max_length: int, param: str) -> ApiError:
    return _too_long(f"the prompt has {count}", param, max_length)


def _chat_prompt(
    extras: _Extras,
    codec: TextCodec,
    max_length: int,
    use: ToolUse | None,
    form: CallFormat | None,
) -> tuple[tuple[int, ...], PromptEmbeds | None]:
    messages = [
        _read_message(message, f"messages[{number}].content", codec, max_length)
        for number, message in enumerate(extras.messages or ())
    ]
    begins = extras.add_generation_prompt is not False
    goes_on = bool(extras.continue_final_message)
    if goes_on and extras.add_generation_prompt:
        message = "either the last message goes on, or an answer begins"
        raise ApiError(400, message, param="continue_final_message")
    more = _template_fields(extras)
    return tell_conversation(
        messages, codec, max_length, use, form, begins=begins, goes_on=goes_on, more=more
    )


def tell_conversation(
    messages: Sequence[dict[str, Any]],
    codec: TextCodec,
    max_length: int,
    use: ToolUse | None,
    form: CallFormat | None,
    *,
    begins: bool = True,
    goes_on: bool = False,
    more: Mapping[str, Any] | None = None,
) -> tuple[tuple[int, ...], PromptEmbeds | None]:
    """Return the tokens of a conversation and the vectors among them, with what may be called.

    The content of a message is a text, or a list of texts and arrays. `begins`: an answer begins after it;
    `goes_on`: the last message is its beginning. What cannot be told is an ApiError.
    """
    plain = read_messages(messages, developer="developer" in codec.template_source)
    if form is None and has_calls(plain):
        form = find_format(codec)
    ways = [plain if form is None else adapt_messages(plain, form, use)]
    if use is not None and isinstance(form, GenericFormat):
        # Some templates know no system: the first message of the user tells of the tools as well.
        told = adapt_messages(plain, form, None)
        ways.append(describe_tools(told, form.describe(use), "user"))
    offered = use.offered if use is not None and form is not None and form.own_template else None
    for number, way in enumerate(ways, 1):
        try:
            if goes_on:
                text = codec.render_chat(way, tools=offered, generate=False, more=more)
                text = cut_final_message(text, way[-1]["content"])
                return tuple(codec.encode(text, special=False, max_tokens=max_length)), None
            tokens, embeds = chat_prompt(
                codec, way, tools=offered, generate=begins, max_tokens=max_length, more=more
            )
            return tuple(tokens), embeds
        except TextTooLongError as error:
            raise _too_long(str(error), "messages", max_length) from error
        # The template refuses this way of telling: try the next, and say why the last one failed.
        except AtollError as error:
            if number == len(ways):
                raise ApiError(400, str(error), param="messages") from error
    raise AssertionError("there is always a way to tell")


def _template_fields(extras: _Extras) -> dict[str, Any]:
    """Return what the chat template is told beside the messages."""
    more = dict(extras.chat_template_kwargs or {})
    taken = sorted(TEMPLATE_FIELDS & set(more))
    if taken:
        message = f"{taken[0]} is not given so: it follows from the request"
        raise ApiError(400, message, param="chat_template_kwargs")
    if extras.reasoning_effort is not None:
        more.setdefault("reasoning_effort", extras.reasoning_effort)
    return more


def cut_final_message(text: str, last: Any) -> str:
    """Return a conversation up to the end of its last message, without the marks that close it."""
    last = last.strip() if isinstance(last, str) else ""
    end = text.rfind(last)
    if end < 0 or not last:
        message = "the chat template does not show the last message as it is"
        raise ApiError(400, message, param="continue_final_message")
    return text[: end + len(last)]


def chat_tokens(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    codec: TextCodec,
    max_tokens: int,
    *,
    generate: bool,
) -> list[int]:
    """Return the tokens of a conversation as a chat with these messages and tools would begin."""
    extras = _Extras(messages=messages, add_generation_prompt=generate)
    use = read_tools(tools, None, None)
    form = None if use is None else find_format(codec)
    tokens, _ = _chat_prompt(extras, codec, max_tokens, use, form)
    return list(tokens)


def _read_message(
    message: dict[str, Any], where: str, codec: TextCodec, most: int
) -> dict[str, Any]:
    """Return a message with its content as a text or a list of texts and vectors; others are refused."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts: list[Any] = []
    for number, part in enumerate(content):
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            parts.append(part["text"])
        elif part.get("type") == "embeds":
            param = f"{where}[{number}].embeds"
            parts.append(read_vectors(part.get("embeds"), codec.width, most, param))
        else:
            raise ApiError(400, "this model reads text only", param="messages.content")
    return message | {"content": parts}


def _prompts(
    request: CompletionRequest, codec: TextCodec, max_length: int
) -> list[tuple[int, ...]]:
    if request.prompt_embeds:
        message = "vectors are taken as parts of messages only, of type embeds"
        raise ApiError(400, message, param="prompt_embeds")
    prompt = request.prompt
    if isinstance(prompt, str):
        return [_encode(prompt, codec, max_length)]
    if prompt and isinstance(prompt[0], int):
        tokens = [part for part in prompt if isinstance(part, int)]
        if len(tokens) != len(prompt):
            raise ApiError(400, "tokens and texts are mixed", param="prompt")
        return [_check(tokens, codec, max_length)]
    if len(prompt) > MAX_CHOICES:
        raise _too_many()
    prompts: list[tuple[int, ...]] = []
    for part in prompt:
        if isinstance(part, str):
            prompts.append(_encode(part, codec, max_length))
        elif isinstance(part, list):
            prompts.append(_check(part, codec, max_length))
        else:
            raise ApiError(400, "tokens and texts are mixed", param="prompt")
    if not prompts:
        raise ApiError(400, "the prompt is empty", param="prompt")
    return prompts


def _encode(text: str, codec: TextCodec, max_length: int) -> tuple[int, ...]:
    try:
        return tuple(codec.encode(text, max_tokens=max_length))
    except TextTooLongError as error:
        raise _too_long(str(error), "prompt", max_length) from error


def _check(
    tokens: list[int], codec: TextCodec, max_length: int, param: str = "prompt"
) -> tuple[int, ...]:
    if len(tokens) > max_length:
        raise _too_many_tokens(len(tokens), max_length, param)
    if any(token >= codec.vocabulary for token in tokens):
        raise ApiError(400, f"tokens are below {codec.vocabulary}", param=param)
    return tuple(tokens)


def _choice(
    request: ChatRequest | CompletionRequest,
    extras: _Extras,
    prompt: tuple[int, ...],
    codec: TextCodec,
    max_length: int,
    number: int,
    embeds: PromptEmbeds | None,
    guide: OutputFormat | None,
) -> ChoiceRequest:
    room = max_length - len(prompt)
    if not prompt:
        raise ApiError(400, "the prompt is empty", param="prompt")
    if room < 1:
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        raise _too_many_tokens(len(prompt), max_length, param)
    most = request.max_tokens
    if isinstance(request, ChatRequest):
        most = request.max_completion_tokens or most
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
    else:
        most = COMPLETION_TOKENS if most is None else most
        logprobs = request.logprobs
    if most == 0 and not getattr(request, "echo", False):
        raise ApiError(400, "at least one token must be generated", param="max_tokens")
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    options = engine_values(request) | engine_values(extras)
    if request.top_p == 0.0:
        # Of no probability at all the likeliest token is left.
        options["temperature"] = 0.0
    if request.seed is not None:
        # Each answer to a prompt has its own.
        options["seed"] = (request.seed + number) % MAX_SEED
    sampling = SamplingParams(
        max_tokens=min(most or room, room),
        min_tokens=min(extras.min_tokens or 0, room),
        logit_bias=_bias(request.logit_bias, codec),
        logprobs=logprobs,
        guide=guide,
        **options,
    )
    return ChoiceRequest(prompt, sampling, tuple(text for text in stop if text), embeds=embeds)


def _bias(logit_bias: dict[str, float] | None, codec: TextCodec) -> tuple[tuple[int, float], ...]:
    pairs = []
    for name, value in (logit_bias or {}).items():
        # The length first: numbers of very many digits take long to read.
        if len(name) > _MAX_DIGITS or not name.isdecimal() or int(name) >= codec.vocabulary:
            raise ApiError(400, f"{name[:40]!r} is no token", param="logit_bias")
        if not -100 <= value <= 100:
            raise ApiError(400, "a bias lies between -100 and 100", param="logit_bias")
        pairs.append((int(name), float(value)))
    return tuple(pairs)


def _resume_choice(
    choice: ChoiceRequest, resume: ResumeField, codec: TextCodec, max_length: int
) -> ChoiceRequest:
    """Return a choice with the answer so far as its beginning."""
    calls = tuple((call.name, call.arguments) for call in resume.calls or ())
    shown, echo = resume.text, choice.echo
    if echo is not None:
        # What was shown begins with the prompt.
        shown, echo = shown[len(echo) :], echo[len(shown) :] or None
    if resume.token_ids is not None:
        generated = _check(resume.token_ids, codec, max_length, "atoll.resume")
    else:
        written = shown
        if calls and choice.calls is not None:
            written += choice.calls.write_open(calls)
        try:
            generated = tuple(codec.encode(written, special=False, max_tokens=max_length))
        except TextTooLongError as error:
            raise _too_long(str(error), "atoll.resume", max_length) from error
    return replace(
        choice,
        generated=generated[: choice.sampling.max_tokens],
        shown=shown,
        shown_calls=calls,
        # What is read of the prompt came with the beginning of the answer.
        read=None if generated else choice.read,
        echo=echo,
    )


_SMALL_BYTES = 2**14
"""Larger requests are read in a thread, so that no stream waits until a long prompt is tokenised."""
_FORMS = (b"tools", b"response_format", *(name.encode() for name in FORMS), b"\\u")
"""So are those whose answer has a form, which is compiled; names may be written with escapes."""
MAX_STOP_CHARS = 2**14
"""Of all stop strings together: every new token is compared with each."""


def is_quick(body: bytes) -> bool:
    """Return whether a body is read in next to no time, so that it can be read between tokens."""
    return len(body) <= _SMALL_BYTES and not any(name in body for name in _FORMS)


def check_limits(request: ChatRequest | CompletionRequest, min_tokens: int | None) -> None:
    """Refuse (ApiError) what is more than the engine does, or what would silently be left out."""
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    chars = sum(map(len, stop))
    if chars > MAX_STOP_CHARS:
        message = f"stop: at most {MAX_STOP_CHARS} characters, these are {chars}"
        raise ApiError(400, message, param="stop", code="too_many_parts")
    max_tokens = request.max_tokens
    if isinstance(request, ChatRequest):
        max_tokens = request.max_completion_tokens or max_tokens
        if request.modalities is not None and "audio" in request.modalities:
            raise ApiError(400, 'this model answers in text: use ["text"]', param="modalities")
        if request.top_logprobs and not request.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if min_tokens is not None and max_tokens is not None and min_tokens > max_tokens:
        message = f"min_tokens is {min_tokens}, more than the {max_tokens} tokens there may be"
        raise ApiError(400, message, param="min_tokens")
