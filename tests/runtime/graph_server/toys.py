"""Small components and tasks, for tests: everything they give can be worked out by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from atoll.components.base import BadInputError, BatchComponent, Done, Setup, StreamComponent
from atoll.tasks.cutting import sentences
from atoll.tasks.library.shapes import (
    Clip,
    DrawingOrder,
    Drawings,
    EmbeddingOrder,
    Embeddings,
    Reply,
    SpeechOrder,
    SpokenText,
    Transcript,
    Turn,
)
from atoll.tasks.task import Task, UnitTask, as_stream
from atoll.tasks.values import Handle, Value

RATE_HZ = 24_000
HERE = "tests.runtime.graph_server.toys"


def encode(inputs: dict[str, Any]) -> dict[str, Any]:
    samples = inputs["audio"]["samples"]
    return {"states": np.resize(samples, (len(samples) // 8, 8)).astype(np.float32)}


def decode(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"text": f"{len(inputs['states'])} steps", "tokens": 2}


def look(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"embeds": np.full((4, 576), inputs["image"].mean(), dtype=np.float32)}


def words_of(messages: list[Any]) -> list[str]:
    """Return the answer of the toy chat, word by word, each with the space after it."""
    said: list[str] = []
    for message in messages:
        content = message["content"]
        parts: list[Any] = content
        if isinstance(content, str):
            parts = [{"type": "text", "text": content}]
        for part in parts:
            if part["type"] == "text":
                said.append(f"You said {part['text']}.")
            else:
                said.append(f"I saw {float(part['embeds'].mean()):.0f}.")
    return [f"{word} " for word in " ".join(said).split()]


def chat(inputs: dict[str, Any]) -> Iterator[Any]:
    if inputs.get("tools"):
        yield from call_first(inputs["tools"])
        return
    words = words_of(inputs["messages"])
    most = inputs.get("max_tokens") or 1000
    resume = inputs.get("resume") or {"token_ids": []}
    for number in range(len(resume["token_ids"]), min(most, len(words))):
        piece: dict[str, Any] = {"text": words[number], "token_ids": [number]}
        if inputs.get("logprobs"):
            piece["logprobs"] = [{"token": words[number], "logprob": -0.5, "top_logprobs": []}]
        yield piece
    yield (
        "end",
        {
            "text": "".join(words[:most]),
            "finish_reason": "length" if most < len(words) else "stop",
            "prompt_tokens": 7,
            "completion_tokens": min(most, len(words)),
        },
    )


def call_first(tools: list[Any]) -> Iterator[Any]:
    """Call the first tool, in two pieces."""
    function = {"name": tools[0]["function"]["name"], "arguments": "{"}
    begin = {"index": 0, "id": "call_1", "type": "function", "function": function}
    yield {"text": "", "token_ids": [0], "tool_calls": [begin]}
    end = {"index": 0, "function": {"arguments": "}"}}
    yield {"text": "", "token_ids": [1], "tool_calls": [end]}
    done = {"text": "", "finish_reason": "tool_calls", "prompt_tokens": 7, "completion_tokens": 2}
    yield "end", done


def speak(inputs: dict[str, Any]) -> dict[str, Any]:
    count = int(240 * len(inputs["text"]) / inputs.get("speed", 1.0))
    return {"samples": np.full(count, 0.5, dtype=np.float32), "rate_hz": RATE_HZ}


def draw(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"image": np.full((32, 64, 3), inputs["seed"] % 256, dtype=np.uint8)}


def embed(inputs: dict[str, Any]) -> dict[str, Any]:
    text = inputs["text"]
    return {"embedding": np.arange(4, dtype=np.float32) + len(text), "tokens": len(text.split())}


FUNCTIONS = {
    "toy-encoder": encode,
    "toy-decoder": decode,
    "toy-eye": look,
    "toy-chat": chat,
    "toy-voice": speak,
    "toy-brush": draw,
    "toy-embedder": embed,
}


class ToyBatch(BatchComponent):
    """A component that is one of the functions here; `name` says which."""

    function: ClassVar[str]

    @classmethod
    def load(cls, setup: Setup) -> Self:
        del setup
        return cls()

    def run(self, batch: Sequence[Any]) -> Sequence[Any]:
        return [self._one(dict(inputs)) for inputs in batch]

    def _one(self, inputs: dict[str, Any]) -> Any:
        if inputs.get("voice") == "nobody":
            return BadInputError("there is no voice 'nobody'", "voice")
        return FUNCTIONS[self.name](inputs)


class ToyEncoder(ToyBatch):
    """Sound to states."""

    name = "toy-encoder"

    def example(self) -> Any:
        return {"audio": {"samples": np.zeros(16, np.float32), "rate_hz": RATE_HZ}}


class ToyDecoder(ToyBatch):
    """States to text."""

    name = "toy-decoder"

    def example(self) -> Any:
        return {"states": np.zeros((2, 8), np.float32)}


class ToyVoice(ToyBatch):
    """Text to sound."""

    name = "toy-voice"

    def example(self) -> Any:
        return {"text": "Hi."}


class ToyChat(StreamComponent):
    """Messages to words, each after `word_s` seconds."""

    name = "toy-chat"

    def __init__(self, word_s: float) -> None:
        self._word_s = word_s

    @classmethod
    def load(cls, setup: Setup) -> Self:
        return cls(float(setup.option("word_s", 0.0)))

    def example(self) -> Any:
        return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}

    async def stream(self, inputs: Any) -> AsyncIterator[Any]:
        for piece in chat(dict(inputs)):
            await asyncio.sleep(self._word_s)
            yield Done(piece[1]) if isinstance(piece, tuple) else piece


class ChatUnit(UnitTask):
    """The toy chat as a stream of texts."""

    def take(self, piece: Value) -> Value:
        assert isinstance(piece, dict)
        return piece["text"]


class ToyAssistant(Task[Turn, Reply]):
    """Hears, sees, answers and speaks."""

    def setup(self) -> None:
        self.encode = UnitTask(self.options.get("encoder", "toy-encoder"))
        self.decode = UnitTask(self.options.get("decoder", "toy-decoder"))
        self.chat = ChatUnit(self.options.get("chat", "toy-chat"), streams=True)
        self.speak = UnitTask(self.options.get("voice", "toy-voice"), cut=sentences())
        if self.options.get("sees", True):
            self.see = UnitTask("toy-eye")

    def invoke(self, request: Turn) -> Reply:
        heard: list[Any] = []
        messages: list[Any] = []
        for message in request.messages:
            content = message["content"]
            if isinstance(content, str):
                messages.append({"role": message["role"], "content": content})
                continue
            parts: list[Any] = []
            for part in content:
                if part["type"] == "audio":
                    states = self.encode(audio=part["audio"])
                    text = self.decode(states=states["states"])["text"]
                    heard.append(text)
                    parts.append({"type": "text", "text": text})
                elif part["type"] in ("image", "video"):
                    images = part.get("frames") or [part["image"]]
                    seen = [self.see(image=image)["embeds"] for image in images]
                    parts += [{"type": "embeds", "embeds": embeds} for embeds in seen]
                else:
                    parts.append(part)
            messages.append({"role": message["role"], "content": parts})
        if request.choice:
            messages = [*messages, {"role": "user", "content": f"{request.choice}"}]
        text = self.chat(messages=messages, **request.sampling, **request.form)
        audio = self.speak(text=text, voice=request.voice) if request.wants_audio else None
        return Reply(text=text, audio=audio, heard=heard)


class ObedientAssistant(ToyAssistant):
    """Hands on everything that a chat may ask."""

    obeys = frozenset({"tools", "response_format", "logprobs", "n"})


@dataclass(frozen=True)
class ReplyWithMeaning:
    """A reply, and things that OpenAI's shape does not know."""

    text: str
    audio: list[Any] | None
    meaning: Handle
    mood: dict[str, float]
    note: str | None = None


class MeaningfulAssistant(Task[Turn, ReplyWithMeaning]):
    """Says hello, and what that means."""

    def setup(self) -> None:
        self.chat = ChatUnit("toy-chat", streams=True)
        self.embed = UnitTask("toy-embedder")

    def invoke(self, request: Turn) -> ReplyWithMeaning:
        text = self.chat(messages=request.messages)
        found = self.embed(text="abc")
        return ReplyWithMeaning(text, None, found["embedding"], {"joy": 0.5})


@dataclass(frozen=True)
class RawReply:
    text: str
    raw: bytes


class RawAssistant(Task[Turn, RawReply]):
    """Answers with what no JSON can say."""


@dataclass(frozen=True)
class MoodySpeech:
    audio: list[Any]
    mood: str


class MoodySpeaker(Task[SpeechOrder, MoodySpeech]):
    """Speaks, and says how."""


class Wordless(Task[Turn, Embeddings]):
    """Answers a chat without text."""


class Texter(Task[Turn, str]):
    """Answers a chat with nothing but a text."""


class Untyped(Task):  # type: ignore[type-arg]
    """Does not say what it answers, which cannot be sent."""

    def invoke(self, request: Any) -> Any:
        del request
        return RawReply("hello", b"raw")


class ToyTranscription(Task[Clip, Transcript]):
    """Writes down how long a sound is."""

    def setup(self) -> None:
        self.encode = UnitTask("toy-encoder")
        self.decode = UnitTask("toy-decoder")

    def invoke(self, request: Clip) -> Transcript:
        states = self.encode(audio=request.audio)
        return Transcript(self.decode(states=states["states"])["text"], 0.0, [[0.0, 1.5]])


class ToySpeech(Task[SpeechOrder, SpokenText]):
    """Speaks sentence by sentence."""

    def setup(self) -> None:
        self.speak = UnitTask(self.options.get("voice", "toy-voice"), cut=sentences())

    def invoke(self, request: SpeechOrder) -> SpokenText:
        text = as_stream(request.text)
        return SpokenText(self.speak(text=text, voice=request.voice, speed=request.speed))


class ToyDrawing(Task[DrawingOrder, Drawings]):
    """Draws in one colour."""

    def setup(self) -> None:
        self.draw = UnitTask("toy-brush")

    def invoke(self, request: DrawingOrder) -> Drawings:
        seeds = range(request.seed, request.seed + request.n)
        return Drawings([self.draw(seed=seed, steps=request.steps)["image"] for seed in seeds])


class ToyEmbedding(Task[EmbeddingOrder, Embeddings]):
    """Counts characters."""

    def setup(self) -> None:
        self.embed = UnitTask("toy-embedder")

    def invoke(self, request: EmbeddingOrder) -> Embeddings:
        found = [self.embed(text=text) for text in request.texts]
        tokens = sum(int(each["tokens"]) for each in found)
        return Embeddings([each["embedding"] for each in found], tokens)


TASKS = {
    "chat": f"{HERE}:ToyAssistant",
    "transcriptions": f"{HERE}:ToyTranscription",
    "speech": f"{HERE}:ToySpeech",
    "images": f"{HERE}:ToyDrawing",
    "embeddings": f"{HERE}:ToyEmbedding",
}
