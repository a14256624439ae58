"""How a stream that broke off goes on elsewhere: what to ask the next backend, what to send of its answer.

There are two ways. *Continue*: the next backend is given the text so far and goes on from there; backends
do this each in their own way. *Replay*: the next backend answers the same request from the start, and
what the client has already is left out; that needs an engine that gives the same answer again (greedy or
seeded), and is checked while it happens. Continuing costs one prefill, so it comes first; replay serves
where text alone does not hold the state of the answer: several answers at once, tool calls, reasoning,
forced forms, penalties over what was generated. Backends of kind `atoll` know that state from the tokens, and
go on in the middle of a call or of a form, too.

Either way the client sees one stream: one id, one time, one role, usage once. Nothing here does I/O.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from typing import Any

import msgspec

from atoll.core.request_parameters import FORMS
from atoll.engines.engine import Engine
from atoll.engines.table import find_engine
from atoll.runtime.gateway.events import (
    Chunk,
    Delivered,
    DeliveredChoice,
    choices_of,
    index_of,
    lists_of,
    sound_of,
    strings_of,
)
from atoll.runtime.openai import ChatRequest, CompletionRequest, Generation

# What tells a client that chunks are of one stream.
_KEPT = ("id", "created", "model", "system_fingerprint", "object")


class DivergedError(Exception):
    """A replayed answer differs from what the client has."""


class Continuation:
    """Rewrites the chunks of a backend that goes on from the text so far.

    `before` are the tokens the client has. `whole` says that the backend counts them itself, as part of
    the answer; else they are part of its prompt. `mute` lets no more text through: the answer is as long
    as it may be, and only the count of the prompt is still wanted.
    """

    def __init__(self, delivered: Delivered, *, whole: bool, mute: bool = False) -> None:
        self._head = delivered.head
        self._before = delivered.tokens
        self._whole = whole
        self.mute = mute

    def chunk(self, chunk: Chunk) -> Chunk | None:
        """Return the chunk as the client should see it, or None: nothing of it is news."""
        _same_stream(chunk, self._head)
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.count(usage)
        kept = []
        for choice in choices_of(chunk):
            if self.mute:
                _silence(choice)
            _without_role(choice)
            if _says_something(choice):
                kept.append(choice)
        if not kept and not isinstance(usage, dict):
            return None
        chunk["choices"] = kept
        return chunk

    def count(self, usage: Chunk) -> None:
        """Make a usage that of the whole answer, as the client has it."""
        if not self._whole:
            _move_tokens(usage, self._before, mute=self.mute)


@dataclass(slots=True)
class _KnownSound:
    """Sound that the client has of an answer: bytes that have not come again, and the CRC-32 of all of it."""

    left: int
    crc: int
    audio_id: str
    again: int = 0
    """CRC-32 of what came again."""

    def cut(self, sound: bytes) -> bytes:
        """Return what of the sound that comes is news."""
        if self.left <= 0:
            return sound
        self.again = zlib.crc32(sound[: self.left], self.again)
        news = sound[self.left :]
        self.left -= len(sound) - len(news)
        if self.left == 0 and self.again != self.crc:
            raise DivergedError("the repeated speech differs")
        return news


class ReplayFilter:
    """Leaves out of a repeated answer what the client has already."""

    mute = False

    def __init__(self, delivered: Delivered) -> None:
        self._head = delivered.head
        self._left = {
            (index, place): text
            for index, answer in delivered.answers.items()
            for place, text in answer.strings.items()
        }
        self._left_listed = {
            (index, place): count
            for index, answer in delivered.answers.items()
            for place, count in answer.listed.items()
        }
        # Calls among them have their id and type at the client.
        self._begun = set(self._left)
        self._sounds = {
            index: _KnownSound(answer.sound_bytes, answer.sound_crc, answer.audio_id)
            for index, answer in delivered.answers.items()
            if answer.spoken
        }
        self._greeted = set(delivered.answers)
        self._finished = {index for index, a in delivered.answers.items() if a.finished}

    def chunk(self, chunk: Chunk) -> Chunk | None:
        """Return the chunk as the client should see it, or None: nothing of it is news."""
        _same_stream(chunk, self._head)
        kept = []
        for choice in choices_of(chunk):
            index = index_of(choice)
            if index in self._finished:
                continue
            if choice.get("finish_reason") is not None and self._open(index):
                # It ends before all that the client has came again.
                raise DivergedError("the repeated answer is shorter")
            if index in self._greeted:
                _without_role(choice)
            if self._cut(index, choice):
                kept.append(choice)
        if not kept and not isinstance(chunk.get("usage"), dict):
            return None
        chunk["choices"] = kept
        return chunk

    def count(self, usage: Chunk) -> None:
        """Leave a usage as it is: the whole answer was made again."""

    def _open(self, index: int) -> bool:
        sound = self._sounds.get(index)
        if sound is not None and sound.left > 0:
            return True
        return any(text for (i, _), text in self._left.items() if i == index)

    def _cut(self, index: int, choice: Chunk) -> bool:
        """Take the known part off all texts and lists of a choice; return whether anything new is left."""
        repeated = self._open(index)
        if isinstance(choice.get("text"), str):
            choice["text"] = self._new(index, ("text",), choice["text"])
        delta = choice.get("delta")
        if isinstance(delta, dict):
            if isinstance(delta.get("audio"), dict):
                self._cut_audio(index, choice, delta)
            for key, value in delta.items():
                if isinstance(value, str) and key != "role":
                    delta[key] = self._new(index, (key,), value)
            calls = delta.get("tool_calls")
            if isinstance(calls, list):
                delta["tool_calls"] = [c for c in calls if self._cut_call(index, c)]
                if not delta["tool_calls"]:
                    del delta["tool_calls"]
            legacy = delta.get("function_call")
            if isinstance(legacy, dict) and not self._cut_call(index, {"function": legacy}):
                del delta["function_call"]
        silent = repeated and not any(piece for _, piece in strings_of(choice))
        # Text may come in other pieces than tokens do, so these are counted by themselves.
        for place, holder, key in lists_of(choice):
            left = self._left_listed.get((index, place))
            if left is None:
                # The engine before listed none, so what comes with text that the client has is not news.
                holder[key] = [] if silent else holder[key]
                continue
            self._left_listed[index, place] = max(0, left - len(holder[key]))
            holder[key] = holder[key][left:]
        return _says_something(choice)

    def _cut_audio(self, index: int, choice: Chunk, delta: Chunk) -> None:
        audio: Chunk = delta["audio"]
        if isinstance(audio.get("transcript"), str):
            audio["transcript"] = self._new(index, ("audio", "transcript"), audio["transcript"])
        known = self._sounds.get(index)
        if known is not None:
            audio["data"] = base64.b64encode(known.cut(sound_of(choice))).decode()
            if known.audio_id:
                audio["id"] = known.audio_id
        for key in ("transcript", "data"):
            if not audio.get(key):
                audio.pop(key, None)
        if audio.keys() <= {"id"}:
            del delta["audio"]

    def _cut_call(self, index: int, call: Any) -> bool:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return True
        number = str(call.get("index", 0))
        known = any(i == index and p[:2] == ("tool", number) for i, p in self._begun)
        is_new = not known
        for key in ("name", "arguments"):
            if isinstance(function.get(key), str):
                new = self._new(index, ("tool", number, key), function[key])
                is_new = is_new or bool(new)
                function[key] = new
                if key == "name" and not new:
                    del function[key]
        if known:
            # The client knows the call by the id it got first.
            call.pop("id", None)
            call.pop("type", None)
        return is_new

    def _new(self, index: int, place: tuple[str, ...], piece: str) -> str:
        left = self._left.get((index, place), "")
        if not left:
            return piece
        shared = min(len(left), len(piece))
        if left[:shared] != piece[:shared]:
            raise DivergedError("the repeated answer differs")
        self._left[index, place] = left[shared:]
        return piece[shared:]


Rewriter = Continuation | ReplayFilter


def _same_stream(chunk: Chunk, head: Chunk | None) -> None:
    if head is None:
        return
    # Of vLLM: the client has it from the first chunk.
    chunk.pop("prompt_token_ids", None)
    for key in _KEPT:
        if key in head:
            chunk[key] = head[key]
        elif key == "system_fingerprint":
            # A fingerprint that the first chunk lacks does not appear in the middle.
            chunk.pop(key, None)


def _move_tokens(usage: Chunk, tokens: int, *, mute: bool) -> None:
    """Count tokens that a backend took as prompt as what they are: part of the answer."""
    prompt, completion = usage.get("prompt_tokens"), 0 if mute else usage.get("completion_tokens")
    if isinstance(prompt, int):
        usage["prompt_tokens"] = max(0, prompt - tokens)
    usage["completion_tokens"] = (completion if isinstance(completion, int) else 0) + tokens
    usage["total_tokens"] = usage.get("prompt_tokens", 0) + usage["completion_tokens"]


def _without_role(choice: Chunk) -> None:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        delta.pop("role", None)


def _silence(choice: Chunk) -> None:
    if isinstance(choice.get("text"), str):
        choice["text"] = ""
    if "delta" in choice:
        choice["delta"] = {}
    for key in ("logprobs", "token_ids"):
        if key in choice:
            choice[key] = None
    if choice.get("finish_reason") is not None:
        # For the client the answer ended at its limit, whatever ended this one.
        choice["finish_reason"] = "length"


def _says_something(choice: Chunk) -> bool:
    if choice.get("finish_reason") is not None or choice.get("text"):
        return True
    if any(holder[key] for _, holder, key in lists_of(choice)):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(bool(value) for value in delta.values())


@dataclass(frozen=True, slots=True)
class Resumption:
    """Request to a backend, and how to read its answer."""

    body: bytes
    rewriter: Rewriter


def resume(request: Generation, body: bytes, delivered: Delivered, kind: str) -> Resumption | None:
    """Return how a stream goes on at a backend of a kind, or None: it cannot.

    `body` is the body of the request as it was sent at first. What was spoken cannot be taken up in the
    middle of a word: it is repeated, where the backend speaks the same again.
    """
    is_spoken = any(answer.spoken for answer in delivered.answers.values())
    if is_spoken and not find_engine(kind).repeats_speech:
        return None
    if not any(a.tokens or any(a.strings.values()) for a in delivered.answers.values()):
        # Nothing said yet: the same request, less its greeting.
        return Resumption(body, ReplayFilter(delivered))
    answer, engine = delivered.answers.get(0), find_engine(kind)
    # Continuing comes first: it costs one prefill, not the whole answer again.
    if answer is not None and _continues(request, delivered, engine):
        data: Chunk = msgspec.json.decode(body)
        if engine.resume == "tokens":
            return _by_tokens(data, answer, delivered)
        return _by_text(request, data, answer, delivered, engine)
    # Only an answer that comes out the same can be repeated.
    if request.temperature == 0.0 or request.seed is not None:
        return Resumption(body, ReplayFilter(delivered))
    return None


def _continues(request: Generation, delivered: Delivered, engine: Engine) -> bool:
    """Return whether the text so far is all that the next backend needs to know."""
    single = (request.n or 1) == 1 and len(delivered.answers) == 1
    if engine.resume == "repeat" or not single:
        return False
    by_tokens = engine.resume == "tokens"
    answer = delivered.answers[0]
    if not (answer.only_calls if by_tokens else answer.only_text):
        return False
    if isinstance(request, CompletionRequest):
        if request.prompt_embeds:
            # Text cannot be added to vectors.
            return False
        special = request.echo or request.suffix or (request.best_of or 1) > 1
        if special and not by_tokens:
            return False
        # Several prompts in one request are several answers.
        if not isinstance(request.prompt, str) and any(
            not isinstance(part, int) for part in request.prompt
        ):
            return False
        if not by_tokens and not isinstance(request.prompt, str):
            return False
    if by_tokens:
        # With the tokens the backend knows forms, calls and penalties by itself.
        return True
    penalised = bool(request.presence_penalty or request.frequency_penalty)
    formed = request.response_format is not None and request.response_format.type != "text"
    formed = formed or any(getattr(request, name) is not None for name in FORMS)
    forced = isinstance(request, ChatRequest) and any(
        choice not in (None, "auto", "none")
        for choice in (request.tool_choice, request.function_call)
    )
    exact = request.temperature == 0.0 or request.seed is not None
    # Penalties over a shorter answer are not quite the same; better than no answer if it cannot be
    # repeated.
    return not formed and not forced and not (penalised and exact)


def _by_tokens(data: Chunk, answer: DeliveredChoice, delivered: Delivered) -> Resumption:
    extension_field = data.get("atoll")
    extension: Chunk = extension_field if isinstance(extension_field, dict) else {}
    state: Chunk = {"text": answer.text, "tokens": answer.tokens}
    ids = answer.token_ids
    calls = _join_calls(None, answer)
    before = extension.get("resume")
    if isinstance(before, dict):
        # Another gateway moved the stream here already.
        text, tokens, first = (before.get(key) for key in ("text", "tokens", "token_ids"))
        state["text"] = (text if isinstance(text, str) else "") + answer.text
        state["tokens"] += tokens if isinstance(tokens, int) else 0
        # All ids or none: with a gap in between they would be those of another text.
        ids = [*first, *ids] if isinstance(first, list) and ids is not None else None
        calls = _join_calls(before.get("calls"), answer)
    if ids:
        state["token_ids"] = ids
    if calls:
        state["calls"] = calls
    data["atoll"] = extension | {"resume": state}
    return Resumption(msgspec.json.encode(data), Continuation(delivered, whole=True))


def _join_calls(before: object, answer: DeliveredChoice) -> list[Chunk]:
    """Return the tool calls of an answer; `before` are those that another gateway had passed on."""
    calls: dict[int, Chunk] = {
        number: {key: str(call.get(key, "")) for key in ("name", "arguments")}
        for number, call in enumerate(before if isinstance(before, list) else ())
        if isinstance(call, dict)
    }
    for place, piece in answer.strings.items():
        if place[0] == "tool" and place[1].isdecimal():
            call = calls.setdefault(int(place[1]), {"name": "", "arguments": ""})
            call[place[2]] += piece
    return [calls[number] for number in sorted(calls)]


def _by_text(
    request: Generation, data: Chunk, answer: DeliveredChoice, delivered: Delivered, engine: Engine
) -> Resumption:
    if isinstance(request, CompletionRequest):
        data["prompt"] = f"{data['prompt']}{answer.text}"
    else:
        messages: list[Chunk] = list(data["messages"])
        last = messages[-1]
        if last.get("role") == "assistant" and isinstance(last.get("content"), str):
            # The client began the answer itself.
            messages[-1] = last | {"content": last["content"] + answer.text}
        else:
            messages.append({"role": "assistant", "content": answer.text})
        data["messages"] = messages
        if not engine.continues_messages:
            data["add_generation_prompt"] = False
            data["continue_final_message"] = True
    mute = _shorten(request, data, answer.tokens, engine)
    return Resumption(msgspec.json.encode(data), Continuation(delivered, whole=False, mute=mute))


def _shorten(request: Generation, data: Chunk, tokens: int, engine: Engine) -> bool:
    """Take the tokens the client has off the limits; return whether none are left."""
    if isinstance(data.get("min_tokens"), int):
        data["min_tokens"] = max(0, data["min_tokens"] - tokens)
    keys = [k for k in ("max_tokens", "max_completion_tokens") if isinstance(data.get(k), int)]
    own = engine.completion_tokens
    # Such an engine has a limit of its own where none is named: what is left of that is asked for.
    if not keys and isinstance(request, CompletionRequest) and own is not None:
        keys = ["max_tokens"]
        data["max_tokens"] = own
    mute = any(data[key] <= tokens for key in keys)
    for key in keys:
        # One token is asked for, so that the prompt is counted; it is not passed on.
        data[key] = 1 if mute else data[key] - tokens
    return mute
