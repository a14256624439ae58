"""A session without sockets: events in and out, turns, answers that end well, badly and half way."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from atoll.core.errors import MissingDependencyError
from atoll.runtime.http.http_client import StatusError
from atoll.runtime.media.media_limits import MediaLimits
from atoll.runtime.media.sounds import decode_sound
from atoll.runtime.realtime.realtime_events import ServerVad
from atoll.runtime.realtime.realtime_limits import RealtimeLimits
from atoll.runtime.realtime.realtime_session import RealtimeSession
from atoll.runtime.realtime.turn_detection import BLOCK, TurnDetector, TurnListener

TURNS_OFF = {
    "type": "session.update",
    "session": {"type": "realtime", "audio": {"input": {"turn_detection": None}}},
}


class Socket:
    """What a client says, and what it is told."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[str | None] = asyncio.Queue()
        self.told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.closed: tuple[int, str] | None = None

    async def __aiter__(self) -> AsyncIterator[str]:
        while (text := await self.said.get()) is not None:
            yield text

    async def send(self, text: str) -> None:
        self.told.put_nowait(json.loads(text))

    def close(self, code: int = 1000, reason: str = "") -> None:
        self.closed = (code, reason)
        self.said.put_nowait(None)


class LoudEar:
    """Takes everything loud for speech."""

    def feed(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        loudest: NDArray[np.float32] = np.abs(samples.reshape(-1, 512)).max(axis=1)
        return loudest


class Server:
    """Answers chats; `hold` makes it wait in the middle."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.texts = ["Yes. It", " is."]
        self.heard: list[str] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.error: Exception | None = None
        self.left = 0

    async def ask(self, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        self.asked.append(body)
        if self.error is not None:
            raise self.error
        spoken = "modalities" in body
        done = False
        try:
            for text in self.texts:
                yield _line({"audio": {"transcript": text}} if spoken else {"content": text})
            if spoken:
                yield _line({"audio": {"data": _sound(500)}})
            await self.hold.wait()
            if spoken:
                yield _line({"audio": {"data": _sound(500)}})
            more = {"atoll": {"answer": {"heard": self.heard}}} if self.heard else {}
            end = {"delta": {}, "finish_reason": "stop", **more}
            yield b"data: " + json.dumps({"choices": [end]}).encode()
            usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
            yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode()
            yield b"data: [DONE]"
            done = True
        finally:
            self.left += not done


def _line(delta: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode()


def _sound(ms: int, level: float = 0.0) -> str:
    """Return a sound of a level, in base64 as clients send it."""
    samples = np.full(24 * ms, int(level * 32767), "<i2")
    return base64.b64encode(samples.tobytes()).decode()


class Client:
    """A client in the middle of a session."""

    def __init__(self, server: Server) -> None:
        self.socket = Socket()
        self.server = server

    def say(self, kind: str, **fields: Any) -> None:
        self.socket.said.put_nowait(json.dumps({"type": kind, **fields}))

    async def until(self, kind: str) -> tuple[dict[str, Any], list[str]]:
        """Return the next event of a kind, and the kinds of all that came before it."""
        before: list[str] = []
        while True:
            event = await asyncio.wait_for(self.socket.told.get(), 20.0)
            if event["type"] == kind:
                return event, before
            assert event["type"] != "error", event
            before.append(event["type"])

    def append(self, ms: int, level: float = 0.0) -> None:
        self.say("input_audio_buffer.append", audio=_sound(ms, level))


def talk(
    scenario: Callable[[Client], Awaitable[None]],
    *,
    limits: RealtimeLimits | None = None,
    ear: Exception | None = None,
) -> Client:
    """Run a scenario in a session, and end it."""

    async def listen() -> LoudEar:
        if ear is not None:
            raise ear
        return LoudEar()

    async def go() -> Client:
        client = Client(Server())
        session = RealtimeSession(
            client.socket, client.server.ask, listen, "m", limits or RealtimeLimits()
        )
        running = asyncio.create_task(session.run())
        created, _ = await client.until("session.created")
        assert created["session"]["model"] == "m"
        await scenario(client)
        client.socket.said.put_nowait(None)
        await asyncio.wait_for(running, 20.0)
        return client

    return asyncio.run(go())


def test_a_turn_is_found_heard_and_answered_aloud() -> None:
    async def scenario(client: Client) -> None:
        session = {
            "type": "realtime",
            "instructions": "Be brief.",
            "audio": {"input": {"transcription": {}}},
        }
        client.say("session.update", session=session)
        assert (await client.until("session.updated"))[0]["session"]["instructions"] == "Be brief."
        client.server.heard = ["two cities"]
        for _ in range(20):
            client.append(100)
        for _ in range(10):
            client.append(100, 0.9)
        for _ in range(10):
            client.append(100)
        started, _ = await client.until("input_audio_buffer.speech_started")
        # 300 ms before it was loud, within a frame and the length of the filter.
        assert abs(started["audio_start_ms"] - 1700) <= 64
        stopped, _ = await client.until("input_audio_buffer.speech_stopped")
        assert abs(stopped["audio_end_ms"] - 3500) <= 64
        done, before = await client.until("response.done")
        assert before == [
            "input_audio_buffer.committed",
            *("conversation.item.added", "conversation.item.done", "response.created"),
            *("conversation.item.added", "response.output_item.added"),
            "response.content_part.added",
            *("response.output_audio_transcript.delta",) * 2,
            *("response.output_audio.delta",) * 2,
            "conversation.item.input_audio_transcription.completed",
            *("response.output_audio.done", "response.output_audio_transcript.done"),
            *("response.content_part.done", "response.output_item.done"),
            "conversation.item.done",
        ]
        response = done["response"]
        assert response["status"] == "completed"
        assert response["usage"] == {"total_tokens": 10, "input_tokens": 7, "output_tokens": 3}
        assert response["output"][0]["content"] == [
            {"type": "output_audio", "transcript": "Yes. It is."}
        ]
        system, user = client.server.asked[0]["messages"]
        assert system == {"role": "system", "content": "Be brief."}
        (part,) = user["content"]
        samples, rate_hz = decode_sound(
            base64.b64decode(part["input_audio"]["data"]), MediaLimits()
        )
        assert rate_hz == 24_000
        assert len(samples) / 24 == stopped["audio_end_ms"] - started["audio_start_ms"]
        # The next question brings words instead of the sound.
        item = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "And?"}],
        }
        client.say("conversation.item.create", item=item)
        client.say(
            "response.create", response={"output_modalities": ["text"], "max_output_tokens": 9}
        )
        done, before = await client.until("response.done")
        assert before.count("response.output_text.delta") == 2
        asked = client.server.asked[1]
        assert [m["content"] for m in asked["messages"]] == [
            "Be brief.",
            "two cities",
            "Yes. It is.",
            "And?",
        ]
        assert (asked["max_completion_tokens"], "modalities" in asked) == (9, False)

    talk(scenario)


def test_whoever_speaks_interrupts_the_answer() -> None:
    async def scenario(client: Client) -> None:
        client.server.hold.clear()
        client.say(
            "conversation.item.create",
            item={"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        )
        client.say("response.create")
        await client.until("response.output_audio.delta")
        client.append(300, 0.9)
        done, before = await client.until("response.done")
        assert "input_audio_buffer.speech_started" in before
        response = done["response"]
        assert response["status"] == "cancelled"
        assert response["status_details"]["reason"] == "turn_detected"
        # One of its sentences was spoken: of what was written, no more counts as said.
        (item,) = response["output"]
        assert (item["status"], item["content"][0]["transcript"]) == ("incomplete", "Yes.")
        assert client.server.left == 1
        client.server.hold.set()
        for _ in range(8):
            client.append(100)
        done, _ = await client.until("response.done")
        assert done["response"]["status"] == "completed"
        assert client.server.asked[1]["messages"][1] == {"role": "assistant", "content": "Yes."}
        # How much was heard of a whole answer, its client says.
        (item,) = done["response"]["output"]
        client.say(
            "conversation.item.truncate", item_id=item["id"], content_index=0, audio_end_ms=500
        )
        await client.until("conversation.item.truncated")
        client.say(
            "conversation.item.create",
            item={"role": "user", "content": [{"type": "input_text", "text": "Go on"}]},
        )
        client.say("response.create")
        await client.until("response.done")
        assert client.server.asked[2]["messages"][-2] == {"role": "assistant", "content": "Yes."}
        # And it may cancel by itself.
        client.server.hold.clear()
        client.say("response.create")
        await client.until("response.output_audio.delta")
        client.say("response.cancel")
        done, _ = await client.until("response.done")
        assert done["response"]["status_details"] == {
            "type": "cancelled",
            "reason": "client_cancelled",
        }

    talk(scenario)


def test_without_turn_detection_the_client_commits() -> None:
    async def scenario(client: Client) -> None:
        client.socket.said.put_nowait(json.dumps(TURNS_OFF))
        await client.until("session.updated")
        client.append(50, 0.9)
        client.say("input_audio_buffer.commit", event_id="e1")
        error, _ = await anyhow(client)
        assert error["error"]["code"] == "input_audio_buffer_commit_empty"
        assert error["error"]["event_id"] == "e1"
        client.append(100, 0.9)
        client.say("input_audio_buffer.commit")
        await client.until("conversation.item.done")
        assert client.server.asked == []
        client.say("response.create")
        assert (await client.until("response.done"))[0]["response"]["status"] == "completed"
        client.append(100)
        client.say("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")

    talk(scenario)


def test_a_turn_that_interrupts_nothing_is_answered_afterwards() -> None:
    async def scenario(client: Client) -> None:
        turns = {"type": "server_vad", "interrupt_response": False}
        session = {"type": "realtime", "audio": {"input": {"turn_detection": turns}}}
        client.say("session.update", session=session)
        client.server.hold.clear()
        client.append(300, 0.9)
        client.append(800)
        await client.until("response.output_audio.delta")
        client.append(300, 0.9)
        client.append(800)
        _, before = await client.until("input_audio_buffer.committed")
        assert "response.done" not in before
        client.server.hold.set()
        for _ in range(2):
            done, _ = await client.until("response.done")
            assert done["response"]["status"] == "completed"
        assert len(client.server.asked) == 2
        # Sounds that nobody heard to the end go along; of many, the last ones.
        sound = {"type": "input_audio", "audio": _sound(100)}
        for _ in range(6):
            client.say("conversation.item.create", item={"role": "user", "content": [sound]})
        client.say("response.create")
        await client.until("response.done")
        parts = [p for m in client.server.asked[2]["messages"] for p in m["content"]]
        assert sum(p["type"] == "input_audio" for p in parts if isinstance(p, dict)) == 4

    talk(scenario)


async def anyhow(client: Client) -> tuple[dict[str, Any], list[str]]:
    """Return the next error, whatever comes before it."""
    before: list[str] = []
    while True:
        event = await asyncio.wait_for(client.socket.told.get(), 20.0)
        if event["type"] == "error":
            return event, before
        before.append(event["type"])


def test_what_is_wrong_is_said_and_ends_nothing() -> None:
    wrong: list[tuple[dict[str, Any] | str, str | None, str]] = [
        ("no json", "invalid_event", "malformed"),
        ({"type": "made.up"}, "invalid_event", "made.up"),
        ({"type": "input_audio_buffer.append", "audio": "!!"}, None, "base64"),
        ({"type": "input_audio_buffer.append", "audio": "AAAA"}, None, "whole samples"),
        ({"type": "response.create"}, "conversation_empty", "nothing to answer"),
        ({"type": "response.cancel"}, "response_cancel_not_active", "no such response"),
        ({"type": "conversation.item.delete", "item_id": "x"}, "item_not_found", "no item x"),
        (
            {
                "type": "session.update",
                "session": {
                    "type": "realtime",
                    "audio": {"input": {"turn_detection": {"type": "semantic_vad"}}},
                },
            },
            "invalid_event",
            "semantic_vad",
        ),
        (
            {"type": "session.update", "session": {"type": "realtime", "model": "other"}},
            None,
            "that of the address",
        ),
        (
            {"type": "session.update", "session": {"type": "realtime", "tools": [{}]}},
            "invalid_event",
            "tools",
        ),
    ]

    async def scenario(client: Client) -> None:
        for event, code, said in wrong:
            client.socket.said.put_nowait(event if isinstance(event, str) else json.dumps(event))
            error, before = await anyhow(client)
            assert not before
            assert error["error"]["code"] == code
            assert said in error["error"]["message"]
        # Answers that are refused, or break off, are told as such.
        client.say(
            "conversation.item.create",
            item={"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        )
        said_429 = (
            b'{"error": {"message": "the key has no tokens left", "type": "x", "code": "quota"}}'
        )
        client.server.error = StatusError("u", 429, said_429)
        client.say("response.create")
        done, _ = await client.until("response.done")
        assert done["response"]["status"] == "failed"
        assert done["response"]["status_details"]["error"] == {
            "type": "quota",
            "code": "quota",
            "message": "the key has no tokens left",
        }

    talk(scenario)


def test_a_session_is_limited_in_all_it_holds() -> None:
    async def scenario(client: Client) -> None:
        # Silence is not held: as much as one likes may come.
        for _ in range(50):
            client.append(100)
        client.append(700, 0.9)
        await client.until("input_audio_buffer.speech_started")
        client.append(900, 0.9)
        error, _ = await anyhow(client)
        assert error["error"]["code"] == "input_audio_buffer_full"
        client.say("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")
        for number in range(3):
            item = {"role": "user", "content": [{"type": "input_text", "text": str(number)}]}
            client.say("conversation.item.create", item=item)
        error, before = await anyhow(client)
        assert error["error"]["code"] == "too_many_items"
        assert before.count("conversation.item.done") == 2

    talk(scenario, limits=RealtimeLimits(buffered_s=2, items=2))

    async def wait(client: Client) -> None:
        error, _ = await anyhow(client)
        assert error["error"]["code"] == "session_expired"

    client = talk(wait, limits=RealtimeLimits(session_s=0.05))
    assert client.socket.closed == (1000, "session_expired")


def test_without_an_ear_turns_are_refused_once() -> None:
    async def scenario(client: Client) -> None:
        client.append(100, 0.9)
        error, _ = await anyhow(client)
        assert error["error"]["code"] == "turn_detection_unavailable"
        client.append(100, 0.9)
        client.say("input_audio_buffer.commit")
        await client.until("conversation.item.done")

    talk(scenario, ear=MissingDependencyError("onnxruntime", "components"))


@pytest.mark.parametrize("size", [BLOCK // 3, BLOCK, 5 * BLOCK + 7])
def test_turns_do_not_depend_on_how_sound_is_cut(size: int) -> None:
    sound = np.zeros(60 * BLOCK, np.float32)
    sound[20 * BLOCK : 40 * BLOCK] = 0.9
    rules = ServerVad(silence_duration_ms=200)
    listener = TurnListener(LoudEar())
    found = [
        (turn.kind, turn.at_ms)
        for at in range(0, len(sound), size)
        for turn in listener.hear(sound[at : at + size], rules)
    ]
    assert [kind for kind, _ in found] == ["started", "stopped"]
    assert abs(found[0][1] - 640) <= 32
    assert abs(found[1][1] - 1280) <= 32
    # A click is no turn, and a pause within one ends none.
    quick = TurnDetector()
    assert not quick.feed(np.array([0.9, 0.0, 0.0, 0.9, 0.9, 0.0], np.float32), rules)
    spoken = np.array([0.9] * 4 + [0.0] * 5 + [0.9] + [0.4] * 20, np.float32)
    assert [turn.kind for turn in quick.feed(spoken, rules)] == ["started"]
