"""Requests to the engine."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.request_parameters import SamplingParams
from atoll.engine.embeds import PromptEmbeds
from atoll.engine.engine_messages import ReadOrder
from atoll.runtime.instance.tools.call_formats import CallFormat


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """Work of the engine for one choice, and how much of it is done."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...]
    generated: tuple[int, ...] = ()
    shown: str = ""
    """Text of the generated tokens that the client has."""
    embeds: PromptEmbeds | None = None
    read: ReadOrder | None = None
    """Readings wanted of the prompt itself."""
    prompt_logprobs: int | None = None
    """Tokens to name for each of the prompt beside it, where it is asked how likely they are (of vLLM)."""
    echo: str | None = None
    """The prompt, where it is to be shown before the answer."""
    is_silent: bool = False
    """Whether the prompt is all that is wanted."""
    calls: CallFormat | None = None
    """How calls are written, where the answer may hold some."""
    shown_calls: tuple[tuple[str, str], ...] = ()
    """Names and arguments of the calls that the client has."""


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request, understood: what each choice asks of the engine, and how to answer."""

    model: str
    is_chat: bool
    stream: bool
    include_usage: bool
    logprobs: bool
    choices: tuple[ChoiceRequest, ...]
    best_of: int = 1
    """Answers to each prompt of which `n` are kept."""
    n: int = 1
    counts: bool = False
    """Whether every event is to say how many tokens its choice has by then."""
    prompt_ids: bool = False
    """Whether the tokens of the prompt are to be named (`return_token_ids` of vLLM)."""
    legacy: bool = False
    """Whether calls are written as they were before tools (`function_call`)."""
    ignored: tuple[str, ...] = ()
    """Fields that were left out."""
