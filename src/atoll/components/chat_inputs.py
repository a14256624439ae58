"""Inputs of components that chat: messages and sampling options, checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from atoll.components.base import BadInputError, Inputs
from atoll.core.request_parameters import (
    ANSWER_FIELDS,
    COMPONENT_PARAMETERS,
    ComponentParameters,
    Parameter,
)

_MAX_MESSAGES = 4096
_MAX_PARTS = 1024
_MAX_CHARS = 2**24
_MAX_STOPS = 64
_MAX_RESUMED = 2**20
_MAX_SIDE = 2**16
_NAMES = frozenset({"messages", "resume", *(each.name for each in COMPONENT_PARAMETERS)})


@dataclass(frozen=True, slots=True)
class AnswerSoFar:
    """The part of an answer that was given elsewhere; `token_ids` are exact, None where nobody knows them."""

    text: str
    token_ids: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class SeenPicture:
    """A picture as an encoder gives it: its vectors, and what else the model's layers have to know of them.

    embeds: float32 [count, width]. grid: frames, height and width, in patches. deepstack: float32 [layers,
    count, width], added to what the first layers give.
    """

    embeds: np.ndarray[Any, Any]
    grid: tuple[int, int, int] | None = None
    deepstack: np.ndarray[Any, Any] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its vectors."""
        shape: tuple[int, ...] = self.embeds.shape
        return shape


class ChatInputs(ComponentParameters, kw_only=True, frozen=True):
    """A conversation and how to answer it, with OpenAI's defaults, as the engine takes them.

    messages: role and content; the content is a text, or a list of texts and of float32 arrays [count,
    width], or of `SeenPicture` for components that take them; of a component that obeys tools, calls and
    results, too. max_tokens: None for as many as there is room for. stop: texts that end the answer. form:
    those of `ANSWER_FIELDS` that are given.
    """

    messages: tuple[dict[str, Any], ...]
    resume: AnswerSoFar | None = None
    form: Mapping[str, Any] = msgspec.field(default_factory=dict)

    @property
    def has_embeds(self) -> bool:
        """Whether a message holds vectors."""
        return any(not isinstance(message["content"], str) for message in self.messages)

    @property
    def chars(self) -> int:
        """Characters of all messages."""
        return sum(
            len(part)
            for message in self.messages
            for part in parts_of(message)
            if isinstance(part, str)
        )

    def check_width(self, width: int) -> None:
        """Refuse vectors that are not as wide as the model."""
        for number, message in enumerate(self.messages):
            for part in parts_of(message):
                if not isinstance(part, str) and part.shape[1] != width:
                    raise BadInputError(
                        f"vectors are {part.shape[1]} wide, the model {width}",
                        f"messages[{number}].content",
                    )


def parts_of(message: Mapping[str, Any]) -> list[Any]:
    """Return the texts and arrays of a checked message."""
    content = message["content"]
    return content if isinstance(content, list) else [content]


def frame_vectors(
    messages: Sequence[dict[str, Any]], frame: Callable[[Any, str], Any]
) -> list[dict[str, Any]]:
    """Return messages with each part that is no text as `frame` has it, which is told where it stands."""

    def framed(content: Any, where: str) -> Any:
        if isinstance(content, str):
            return content
        return [part if isinstance(part, str) else frame(part, where) for part in content]

    return [
        message | {"content": framed(message["content"], f"messages[{number}].content")}
        for number, message in enumerate(messages)
    ]


def read_chat(
    inputs: Inputs, obeys: Collection[str] = (), *, takes_pictures: bool = False
) -> ChatInputs:
    """Check what one invocation brings; what is wrong is a BadInputError that names it.

    `obeys` is the component's: what is in `form` is as the client sent it. `takes_pictures`: whether it takes
    more of a picture than its vectors.
    """
    known = _NAMES | {name for name, of in ANSWER_FIELDS.items() if of in obeys}
    unknown = sorted(set(inputs) - known)
    if unknown:
        raise BadInputError(f"unknown input; known are {', '.join(sorted(known))}", unknown[0])
    given: dict[str, Any] = {
        each.name: _stops(inputs.get("stop")) if each.name == "stop" else _number(inputs, each)
        for each in COMPONENT_PARAMETERS
    }
    return ChatInputs(
        messages=_messages(
            inputs.get("messages"), _CALLS if "tools" in obeys else (), takes_pictures
        ),
        resume=_resume(inputs.get("resume")),
        form={name: inputs[name] for name in ANSWER_FIELDS if inputs.get(name) is not None},
        **given,
    )


_CALLS = ("tool_calls", "tool_call_id", "name")
"""Fields of messages that tell of calls and their results."""


def _messages(
    value: Any, calls: Collection[str], takes_pictures: bool
) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= _MAX_MESSAGES:
        raise BadInputError(f"give a list of 1 to {_MAX_MESSAGES} messages", "messages")
    return tuple(
        _message(message, f"messages[{i}]", calls, takes_pictures)
        for i, message in enumerate(value)
    )


def _message(
    value: Any, where: str, calls: Collection[str], takes_pictures: bool
) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise BadInputError("a message has a role and a content", where)
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str) or not 1 <= len(role) <= 64:
        raise BadInputError("a role is a short text", f"{where}.role")
    # What clients of OpenAI send along empty is of no consequence; anything else would be lost.
    told = {key: value[key] for key in calls if value.get(key)}
    lost = [key for key in value if key not in ("role", "content", "name", *told) and value[key]]
    if lost:
        raise BadInputError("this model reads role and content only", f"{where}.{lost[0]}")
    if content is None and "tool_calls" in told:
        content = ""
    if isinstance(content, list):
        content = _parts(content, f"{where}.content", takes_pictures)
    elif not isinstance(content, str) or len(content) > _MAX_CHARS:
        raise BadInputError("a content is a text or a list of parts", f"{where}.content")
    return {"role": role, "content": content, **told}


def _parts(content: list[Any], where: str, takes_pictures: bool) -> str | list[Any]:
    """Return parts as texts and vectors, or as one text where there are no vectors."""
    if len(content) > _MAX_PARTS:
        raise BadInputError(f"a message has at most {_MAX_PARTS} parts", where)
    parts: list[Any] = []
    for number, part in enumerate(content):
        place = f"{where}[{number}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            if len(part["text"]) > _MAX_CHARS:
                raise BadInputError(f"a text has at most {_MAX_CHARS} characters", place)
            parts.append(part["text"])
        elif kind == "embeds":
            seen = _picture(part.get("embeds"), f"{place}.embeds")
            if takes_pictures:
                parts.append(seen)
                continue
            for name in ("grid", "deepstack"):
                if getattr(seen, name) is not None:
                    raise BadInputError(
                        f"this model reads vectors alone and cannot take {name}",
                        f"{place}.embeds.{name}",
                    )
            parts.append(seen.embeds)
        else:
            raise BadInputError("this model reads parts of type text and embeds", place)
    return "".join(parts) if all(isinstance(part, str) for part in parts) else parts


def _picture(value: Any, where: str) -> SeenPicture:
    """Return vectors, given as they are or as an encoder's whole output."""
    if not isinstance(value, Mapping):
        return SeenPicture(_vectors(value, where))
    unknown = sorted(set(value) - {"embeds", "grid", "deepstack"})
    if unknown:
        raise BadInputError("known are embeds, grid and deepstack", f"{where}.{unknown[0]}")
    embeds = _vectors(value.get("embeds"), f"{where}.embeds")
    grid, deepstack = value.get("grid"), value.get("deepstack")
    if grid is not None and not (
        isinstance(grid, list)
        and len(grid) == 3
        and all(type(side) is int and 1 <= side <= _MAX_SIDE for side in grid)
    ):
        raise BadInputError("give frames, height and width, in patches", f"{where}.grid")
    if deepstack is not None:
        if not isinstance(deepstack, np.ndarray) or deepstack.ndim != 3 or not len(deepstack):
            raise BadInputError("give an array [layers, count, width]", f"{where}.deepstack")
        deepstack = np.stack([_vectors(layer, f"{where}.deepstack") for layer in deepstack])
        if deepstack.shape[1:] != embeds.shape:
            raise BadInputError(
                f"its vectors have to be {list(embeds.shape)}, as embeds", f"{where}.deepstack"
            )
    return SeenPicture(embeds, None if grid is None else (grid[0], grid[1], grid[2]), deepstack)


def _vectors(value: Any, where: str) -> np.ndarray[Any, Any]:
    if not isinstance(value, np.ndarray) or value.ndim != 2 or value.dtype.kind != "f":
        raise BadInputError("vectors are an array of floats, [count, width]", where)
    if not value.size:
        raise BadInputError("there are no vectors", where)
    rows = value.astype(np.float32)
    if not np.isfinite(rows).all():
        raise BadInputError("a vector holds a number that is not finite", where)
    return rows


def _number(inputs: Inputs, parameter: Parameter) -> Any:
    value = inputs.get(parameter.name)
    if value is not None:
        kind, low, high = parameter.limits("component")
        accepted = int if kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, accepted) or not low <= value <= high:
            said = f"whole number between {low} and {high}"
            if kind is float:
                said = f"number between {low:g} and {high:g}"
            raise BadInputError(f"give a {said}", parameter.name)
    return parameter.engine_value(value)


def _stops(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or len(texts) > _MAX_STOPS:
        raise BadInputError(f"give at most {_MAX_STOPS} texts", "stop")
    if not all(isinstance(text, str) and len(text) <= 1024 for text in texts):
        raise BadInputError("give texts of at most 1024 characters", "stop")
    return tuple(text for text in texts if text)


def _resume(value: Any) -> AnswerSoFar | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise BadInputError("give the text so far and its token_ids", "resume")
    text, tokens = value.get("text", ""), value.get("token_ids")
    if not isinstance(text, str) or len(text) > _MAX_CHARS:
        raise BadInputError("give the text so far", "resume.text")
    if tokens is None or (tokens == [] and text):
        # Servers that do not say their tokens leave the list empty.
        return AnswerSoFar(text, None) if text else None
    if not isinstance(tokens, list) or len(tokens) > _MAX_RESUMED:
        raise BadInputError(f"give at most {_MAX_RESUMED} tokens", "resume.token_ids")
    if any(isinstance(t, bool) or not isinstance(t, int) or t < 0 for t in tokens):
        raise BadInputError("tokens are whole numbers from 0 on", "resume.token_ids")
    return AnswerSoFar(text, tuple(tokens)) if tokens else None
