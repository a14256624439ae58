"""Options of answers: prompts that are shown or scored, text before a suffix, the best of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from atoll.engine.engine_errors import TextTooLongError
from atoll.engine.engine_messages import ReadOrder
from atoll.engine.text import TextCodec
from atoll.runtime.instance.choice_request import ChoiceRequest
from atoll.runtime.openai import ApiError, ChatRequest, CompletionRequest


@dataclass(frozen=True, slots=True)
class FillMarks:
    """The tokens by which a model is told what stands before and after the text it is to write.

    Where `suffix_first`, what comes after is told first. `ends` may end the answer, besides the usual.
    """

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()
    suffix_first: bool = False


FAMILIES = (
    FillMarks(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    FillMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<file_sep>")),
    FillMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>",)),
    FillMarks("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
    FillMarks("<PRE>", "<SUF>", "<MID>", ("<EOT>",)),
    # What these models call "hole" stands between the two texts, as a mark of the suffix does.
    FillMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - their names
    FillMarks("[PREFIX]", "[SUFFIX]", "", suffix_first=True),
)
"""Of Qwen and CodeGemma, StarCoder, SantaCoder, Code Llama (twice), DeepSeek, Codestral."""


def check_completion(request: CompletionRequest) -> None:
    """Refuse (ApiError) what does not go together."""
    best, count = request.best_of, request.n or 1
    if best is None or best == count:
        return
    if best < count:
        raise ApiError(400, f"best_of is {best}, less than n, which is {count}", param="best_of")
    if request.stream:
        message = "which answer is best is known at the end: best_of cannot be streamed"
        raise ApiError(400, message, param="best_of")


@dataclass(frozen=True, slots=True)
class FilledPrompts:
    """Prompts with what comes after, and the tokens that end an answer to them."""

    prompts: list[tuple[int, ...]]
    ends: tuple[int, ...]


def fill_in(
    prompts: Sequence[tuple[int, ...]], suffix: str, model: str, codec: TextCodec, max_tokens: int
) -> FilledPrompts:
    """Return prompts that ask for the text between each and the suffix; 400 where the model cannot."""
    marks = next((found for found in FAMILIES if _known(found, codec)), None)
    if marks is None:
        message = f"the model {model!r} has no tokens for text before a suffix: leave suffix out"
        raise ApiError(400, message, param="suffix")
    try:
        after = codec.encode(suffix, special=False, max_tokens=max_tokens)
    except TextTooLongError as error:
        raise ApiError(400, str(error), param="suffix", code="context_length_exceeded") from error
    begin = codec.encode("")
    filled = []
    for prompt in prompts:
        own = list(prompt)
        if begin and own[: len(begin)] == begin:
            own = own[len(begin) :]
        filled.append((*begin, *_arrange(marks, own, after, codec)))
    ends = [codec.token_of(name) for name in marks.ends]
    return FilledPrompts(filled, tuple(token for token in ends if token is not None))


def _known(marks: FillMarks, codec: TextCodec) -> bool:
    names = (marks.prefix, marks.suffix, marks.middle)
    return all(codec.token_of(name) is not None for name in names if name)


def _arrange(
    marks: FillMarks, before: Sequence[int], after: Sequence[int], codec: TextCodec
) -> list[int]:
    def mark(name: str) -> list[int]:
        token = codec.token_of(name) if name else None
        return [] if token is None else [token]

    first, second = [*mark(marks.prefix), *before], [*mark(marks.suffix), *after]
    if marks.suffix_first:
        first, second = second, first
    return [*first, *second, *mark(marks.middle)]


def echo_text(
    request: CompletionRequest, number: int, prompt: Sequence[int], codec: TextCodec
) -> str:
    """Return what a prompt looks like to its client: its text, or that of its tokens."""
    given = request.prompt
    if isinstance(given, str):
        return given
    part = given[number] if number < len(given) else None
    return part if isinstance(part, str) else codec.decode(prompt, skip_special=False)


def best_of(request: ChatRequest | CompletionRequest) -> int:
    """Return how many answers a prompt gets."""
    best = request.best_of if isinstance(request, CompletionRequest) else None
    return best or request.n or 1


def as_completion(
    request: CompletionRequest, choice: ChoiceRequest, number: int, codec: TextCodec
) -> ChoiceRequest:
    """Return the choice of a prompt, the one of that number, with what only completions have."""
    update: dict[str, Any] = {}
    if request.best_of and request.best_of > (request.n or 1) and request.logprobs is None:
        # To know which is best.
        update["sampling"] = choice.sampling.model_copy(update={"logprobs": 0})
    if request.echo:
        update["echo"] = echo_text(request, number, choice.prompt, codec)
        update["is_silent"] = request.max_tokens == 0
        if request.logprobs is not None:
            update["read"] = ReadOrder(scores=request.logprobs)
        if request.max_tokens == 0:
            update["sampling"] = choice.sampling.model_copy(update={"max_tokens": 1})
    return replace(choice, **update) if update else choice


def score_prompt(choice: ChoiceRequest, top: int) -> ChoiceRequest:
    """Return a choice of which it is also said how likely each token of its prompt is."""
    order = choice.read or ReadOrder()
    wanted = order.model_copy(update={"scores": max(order.scores or 0, top)})
    return replace(choice, read=wanted, prompt_logprobs=top)
