"""The tasks of the library, over components that say what they were given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from atoll.core.errors import InputError
from atoll.core.request_parameters import TASK_DEFAULTS
from atoll.tasks.invocation import Final, Invocation
from atoll.tasks.library.assistant import Reply, SpeakingAssistant, Turn
from atoll.tasks.library.drawing import Drawing, DrawingOrder, difficulty_of
from atoll.tasks.library.embedding import Embedding, EmbeddingOrder, Embeddings
from atoll.tasks.library.speech import Speech, SpeechOrder, SpokenText
from atoll.tasks.library.transcription import Clip, Transcript, Transcription
from atoll.tasks.run import Run
from atoll.tasks.values import Handle, Value
from tests.reference.direct_tasks import run_directly


def array(name: str, *shape: int) -> Handle:
    return Handle(name.encode().hex().ljust(32, "0"), "o", "h:1", "h", "", "float32", shape, 0)


def sound(name: str, samples: int = 16_000) -> dict[str, Any]:
    return {"samples": array(name, samples), "rate_hz": 16_000}


def name_of(handle: Any) -> str:
    assert isinstance(handle, Handle)
    return bytes.fromhex(handle.id).rstrip(b"\0").decode()


class Echo:
    """Components whose answers are made of names of what went in."""

    def __init__(self) -> None:
        self.made: list[Invocation] = []

    def answer(self, invocation: Invocation) -> Any:
        self.made.append(invocation)
        given: Any = invocation.inputs
        match invocation.component:
            case "moonshine-encoder":
                return {
                    "states": array("s" + name_of(given["audio"]["samples"]), 4, 288),
                    "samples": 9,
                }
            case "moonshine-decoder":
                assert given["samples"] == 9
                return {"text": f"heard {name_of(given['states'])[1:]}", "tokens": 2}
            case "silero-vad":
                silent = name_of(given["audio"]["samples"]).startswith("quiet")
                return {
                    "segments": [] if silent else [[0.1, 0.9]],
                    "speech_s": 0.0 if silent else 0.8,
                }
            case "smollm2-vision":
                return {"embeds": array("e" + name_of(given["image"]), 7, 576)}
            case "hibari":
                return {"samples": array(given["text"][:15], 24_000), "rate_hz": 24_000}
            case "terrain-diffusion":
                return {"image": array(f"i{given['seed']}", 128, 128, 3)}
            case "minilm":
                return {"embedding": array(given["text"], 384), "tokens": len(given["text"])}
        assert invocation.component == "smollm2"
        return [{"text": text, "token_ids": [1]} for text in ("Yes. ", "It", " is.")]

    async def call(self, invocation: Invocation) -> Value:
        await asyncio.sleep(0)
        given: Value = self.answer(invocation)
        return given

    async def stream(self, invocation: Invocation) -> AsyncIterator[Value | Final]:
        for piece in self.answer(invocation):
            await asyncio.sleep(0)
            yield piece
        yield Final({"finish_reason": "stop"})

    def inputs(self, component: str) -> list[Any]:
        return [made.inputs for made in self.made if made.component == component]


def run(task: Any, request: Any) -> tuple[Any, Echo, Run[Any]]:
    """Run a task, and check that it is what it does directly."""
    echo = Echo()
    done = Run(task, request, echo, double_check=True)
    found = asyncio.run(done.result())
    assert found == run_directly(task, request, Echo().answer)
    return found, echo, done


MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Look:"},
            {"type": "image", "image": array("cat", 8, 8, 3)},
            {"type": "audio", "audio": sound("one")},
            {"type": "video", "frames": [array("f1", 8, 8, 3), array("f2", 8, 8, 3)]},
        ],
    },
    {"role": "user", "content": [{"type": "audio", "audio": sound("two")}]},
]


def test_the_assistant_hears_sees_thinks_and_speaks() -> None:
    turn = Turn(MESSAGES, True, "heart", {"max_tokens": 5, "temperature": None, "stop": ["x"]})
    found, echo, done = run(SpeakingAssistant(), turn)
    assert isinstance(found, Reply)
    assert found.text == "Yes. It is."
    assert found.heard == ["heard one", "heard two"]
    assert found.audio is not None
    assert [name_of(each["samples"]) for each in found.audio] == ["Yes.", "It is."]
    (asked,) = echo.inputs("smollm2")
    assert {name: value for name, value in asked.items() if name != "messages"} == {
        **TASK_DEFAULTS,
        "max_tokens": 5,
        "temperature": 1.0,
        "stop": ["x"],
    }
    system, user, heard = asked["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert heard == {"role": "user", "content": "heard two"}
    kinds = [part.get("text") or name_of(part["embeds"]["embeds"]) for part in user["content"]]
    assert kinds == ["Look:", "ecat", "heard one", "ef1", "ef2"]
    assert [given["voice"] for given in echo.inputs("hibari")] == ["heart", "heart"]
    assert done.rounds == 1  # nothing is looked at


def test_the_assistant_hands_on_what_a_chat_asks_beside_words() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_call_id": "c"},
    ]
    turn = Turn(said, sampling={"seed": 5}, form={"tools": [{}], "logprobs": True}, choice=2)
    _, echo, _ = run(SpeakingAssistant(), turn)
    (asked,) = echo.inputs("smollm2")
    assert asked["messages"] == said
    assert asked == {**TASK_DEFAULTS, **turn.form, "stop": [], "seed": 7, "messages": said}


def test_the_assistant_is_silent_unless_asked_to_speak() -> None:
    found, echo, _ = run(SpeakingAssistant(), Turn([{"role": "user", "content": "Hi"}]))
    assert found == Reply("Yes. It is.", None, [])
    assert [made.component for made in echo.made] == ["smollm2"]


def test_sounds_without_speech_are_left_out() -> None:
    messages = [
        {"role": "user", "content": [{"type": "audio", "audio": sound(name)}]}
        for name in ("one", "quiet", "two")
    ]
    found, echo, done = run(SpeakingAssistant({"voice_activity": True}), Turn(messages))
    assert found.heard == ["heard one", "", "heard two"]
    assert len(echo.inputs("silero-vad")) == 3
    assert len(echo.inputs("moonshine-encoder")) == 2
    assert done.rounds == 2


def test_components_are_chosen_by_options() -> None:
    options = {"think": "openai-chat", "speak": "other", "hear_encoder": "ears", "see": "eyes"}
    task = SpeakingAssistant(options)
    assert (task.think.component, task.speak.component) == ("openai-chat", "other")
    assert (task.hear.encode.component, task.see.component) == ("ears", "eyes")
    assert task.hear.decode.component == "moonshine-decoder"


def test_unknown_parts_are_refused() -> None:
    turn = Turn([{"role": "user", "content": [{"type": "smell", "smell": "roses"}]}])
    with pytest.raises(
        InputError, match=r"unknown kind 'smell' \(fix: text, image, audio or video\)"
    ):
        asyncio.run(Run(SpeakingAssistant(), turn, Echo()).result())


def test_transcription() -> None:
    found, _, done = run(Transcription(), Clip(sound("one", 24_000)))
    assert found == Transcript("heard one", 1.5, [[0.0, 1.5]], ["heard one"])
    assert done.rounds == 1
    found, _, _ = run(Transcription({"voice_activity": True}), Clip(sound("one")))
    assert found == Transcript("heard one", 1.0, [[0.1, 0.9]], ["heard one"])
    found, echo, _ = run(Transcription({"voice_activity": True}), Clip(sound("quiet")))
    assert found == Transcript("", 1.0, [])
    assert not echo.inputs("moonshine-encoder")


def test_a_long_clip_is_heard_by_the_piece_and_written_as_one() -> None:
    pieces = [sound("one"), sound("quiet"), sound("two", 32_000)]
    clip = Clip(sound("whole", 64_000), pieces=pieces)
    found, echo, _ = run(Transcription({"voice_activity": True}), clip)
    assert found.text == "heard one heard two"
    assert found.seconds == 4.0
    assert found.segments == [[0.1, 0.9], [2.1, 2.9]]
    assert found.texts == ["heard one", "heard two"]
    assert [name_of(i["audio"]["samples"]) for i in echo.inputs("moonshine-encoder")] == [
        "one",
        "two",
    ]
    found, _, done = run(Transcription(), clip)
    assert found.texts == ["heard one", "heard quiet", "heard two"]
    assert found.segments == [[0.0, 1.0], [1.0, 2.0], [2.0, 4.0]]
    assert done.rounds == 2  # all pieces are heard before the first text is looked at


def test_long_sounds_of_a_chat_are_heard_by_the_piece() -> None:
    whole = {"type": "audio", "audio": sound("all"), "pieces": [sound("one"), sound("two")]}
    short = {"type": "audio", "audio": sound("three")}
    turn = Turn([{"role": "user", "content": [whole]}, {"role": "user", "content": [short]}])
    found, echo, done = run(SpeakingAssistant(), turn)
    assert found.heard == ["heard one heard two", "heard three"]
    said = [message["content"] for message in echo.inputs("smollm2")[0]["messages"]]
    assert said == ["heard one heard two", "heard three"]
    assert done.rounds == 2


def test_speech_comes_by_the_sentence() -> None:
    found, echo, _ = run(Speech(), SpeechOrder("One. Two is longer.", "heart", 1.5))
    assert isinstance(found, SpokenText)
    assert [name_of(each["samples"]) for each in found.audio] == ["One.", "Two is longer."]
    assert {given["speed"] for given in echo.inputs("hibari")} == {1.5}


def test_drawing() -> None:
    found, echo, _ = run(Drawing(), DrawingOrder("steep mountains", 3, 7, 4))
    assert [name_of(image) for image in found.images] == ["i7", "i8", "i9"]
    assert {
        (given["steps"], given["difficulty"]) for given in echo.inputs("terrain-diffusion")
    } == {(4, 0.9)}
    assert difficulty_of("a FLAT plain") == 0.1
    assert difficulty_of("a house") == difficulty_of("a steep but gentle hill") == 0.5


def test_embedding_takes_two_rounds_however_many_texts() -> None:
    texts = ["a", "bb", "ccc"] * 20
    found, _, done = run(Embedding(), EmbeddingOrder(texts))
    assert isinstance(found, Embeddings)
    assert [name_of(vector) for vector in found.vectors] == texts
    assert found.tokens == 120
    assert done.rounds == 2
