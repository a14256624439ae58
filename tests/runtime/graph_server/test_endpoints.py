"""The endpoints in OpenAI's shapes, over executors in memory: no sockets."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import struct
import sys
import wave
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.core.errors import InputError
from atoll.runtime.graph_server.graph_config import ExecutorAddress, GraphServerConfig, GraphService
from atoll.runtime.graph_server.graph_server import TaskGraphServer
from atoll.runtime.graph_server.recovery import TroubleError
from atoll.runtime.http.handlers import Answer, Response
from atoll.runtime.http.http_server import Request
from atoll.runtime.media.media_limits import MediaLimits
from atoll.runtime.media.pictures import encode_png
from atoll.runtime.media.sounds import encode_wav
from atoll.runtime.openai import ApiError, join_calls
from tests.runtime.graph_server.fakes import FakeFleet
from tests.runtime.graph_server.toys import FUNCTIONS, HERE, RATE_HZ, TASKS

TOKEN = "t" * 32


class Bench:
    """A graph server over two executors in memory."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.fleet = FakeFleet({name: dict(FUNCTIONS) for name in ("x-0", "x-1")})
        executors = tuple(
            ExecutorAddress(id=name, address="127.0.0.1:1", components=tuple(FUNCTIONS))
            for name in self.fleet.executors
        )
        settings: dict[str, Any] = {
            "name": "graph-server-0",
            "port": 0,
            "services": (GraphService(name="omni", tasks=TASKS),),
            "executors": executors,
            "store": str(folder / "store"),
            "token_file": str(folder / "token"),
            "patience_s": 1e-6,
        }
        self.config = GraphServerConfig(**(settings | changes))
        self.server = TaskGraphServer(self.config, TOKEN, self.fleet)

    async def ask(
        self,
        path: str,
        body: Any = None,
        *,
        headers: dict[bytes, bytes] | None = None,
        method: str = "POST",
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of an answer."""
        request = Request(method.encode(), path.encode(), headers or {})
        request.id = b"req-1"
        request.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            answer = await self.server.handle(request)
        except ApiError as error:
            return error.status, {}, error.body()
        return await read(answer)

    async def json(self, path: str, body: Any = None, **options: Any) -> Any:
        status, _, data = await self.ask(path, body, **options)
        assert status == 200, data
        return json.loads(data)

    async def events(self, path: str, body: Any, **options: Any) -> list[Any]:
        """Return the events of a stream that ends as it should."""
        status, _, data = await self.ask(path, body, **options)
        assert status == 200, data
        lines = data.decode().split("\n\n")
        assert lines.pop() == ""
        return [json.loads(x.removeprefix("data: ")) for x in lines if x != "data: [DONE]"]

    async def refused(self, path: str, body: Any, **options: Any) -> Any:
        status, _, data = await self.ask(path, body, **options)
        assert status >= 400
        return json.loads(data)["error"] | {"status": status}


async def read(answer: Answer) -> tuple[int, dict[str, str], bytes]:
    if isinstance(answer, Response):
        return answer.status, dict(answer.headers), answer.body
    pieces = [piece async for piece in answer.pieces]
    return 200, dict(answer.headers), b"".join(pieces)


@asynccontextmanager
async def serving(folder: Path, **changes: Any) -> AsyncIterator[Bench]:
    """A graph server of which nothing is left anywhere, whatever was asked."""
    bench = Bench(folder, **changes)
    try:
        yield bench
        assert bench.fleet.held() == set()
        assert len(bench.server.store) == 0
        assert bench.server.status()["running"] == 0
        assert bench.server.intake.busy_bytes == 0
    finally:
        await bench.server.close(0.0)


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def sound(seconds: float = 0.5, rate_hz: int = 16_000) -> bytes:
    return encode_wav(np.zeros(int(seconds * rate_hz), np.float32), rate_hz)


def message(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


PICTURE = {
    "type": "image_url",
    "image_url": {"url": data_url(encode_png(np.full((64, 96, 3), 9, np.uint8)))},
}
SOUND = {
    "type": "input_audio",
    "input_audio": {"data": base64.b64encode(sound()).decode(), "format": "wav"},
}
CHAT = "/v1/chat/completions"
HELLO = {"model": "omni", "messages": [{"role": "user", "content": "hello"}]}


async def test_a_chat_in_text(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        status, headers, data = await bench.ask(CHAT, HELLO)
        answer = json.loads(data)
        assert status == 200
        assert answer["object"] == "chat.completion"
        choice = answer["choices"][0]
        assert choice["message"]["content"] == "You said hello. "
        assert choice["finish_reason"] == "stop"
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
            7,
            3,
            10,
        )
        assert "audio_seconds" not in usage
        assert headers["x-atoll-path"] == "toy-chat=x-0"
        assert json.loads(headers["x-atoll-usage"])["completion_tokens"] == 3


async def test_a_chat_with_everything_and_speech_whole(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        body = {
            "model": "omni",
            "messages": message({"type": "text", "text": "look"}, PICTURE, SOUND),
            "modalities": ["text", "audio"],
            "audio": {"voice": "heart", "format": "wav"},
        }
        answer = await bench.json(CHAT, body)
        said = answer["choices"][0]["message"]
        assert said["audio"]["transcript"] == "You said look. I saw 9. You said 1000 steps. "
        assert said["content"] is None
        with wave.open(io.BytesIO(base64.b64decode(said["audio"]["data"]))) as file:
            frames = file.getnframes()
            assert file.getframerate() == RATE_HZ
        # Three sentences, 240 samples a character, without the spaces between them.
        assert frames == 240 * sum(map(len, ("You said look.", "I saw 9.", "You said 1000 steps.")))
        usage = answer["usage"]
        assert usage["audio_seconds"] == 0.5
        assert usage["speech_seconds"] == pytest.approx(frames / RATE_HZ, abs=1e-3)
        assert usage["image_pixels"] == 64 * 96
        assert usage["prompt_tokens_details"]["image_tokens"] == 4


async def test_a_chat_streamed_with_speech_is_the_same_answer(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        body = {
            "model": "omni",
            "messages": message({"type": "text", "text": "one. two. three"}, SOUND),
            "modalities": ["text", "audio"],
            "audio": {"format": "pcm16"},
        }
        whole = (await bench.json(CHAT, body))["choices"][0]["message"]
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        chunks = await bench.events(CHAT, streamed)
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
        assert deltas[0] == {"role": "assistant"}
        assert not any("content" in d for d in deltas)
        audio = [d["audio"] for d in deltas if "audio" in d]
        assert len({a["id"] for a in audio}) == 1
        assert "".join(a.get("transcript", "") for a in audio) == whole["audio"]["transcript"]
        pcm = b"".join(base64.b64decode(a["data"]) for a in audio if "data" in a)
        assert pcm == base64.b64decode(whole["audio"]["data"])
        assert len([a for a in audio if "data" in a]) == 4
        first_sound = next(n for n, d in enumerate(deltas) if "data" in d.get("audio", {}))
        last_text = max(n for n, d in enumerate(deltas) if d.get("audio", {}).get("transcript"))
        assert first_sound < last_text
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["usage"]["speech_seconds"] == pytest.approx(
            len(pcm) / 2 / RATE_HZ, abs=1e-3
        )
        assert len({c["id"] for c in chunks}) == 1


async def test_length_is_a_reason_to_finish(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        answer = await bench.json(CHAT, HELLO | {"max_completion_tokens": 2})
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["choices"][0]["message"]["content"] == "You said "


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"messages": message({"type": "image_url", "image_url": {"url": "http://x/y.png"}})},
         "messages[0].content[0].image_url"),
        ({"messages": message(SOUND | {"input_audio": {"data": "AAAA", "format": "wav"}})},
         "messages[0].content[0].input_audio"),
        ({"messages": message({"type": "file", "file": {}})}, "messages[0].content[0].type"),
        ({"modalities": ["text", "audio"], "stream": True}, "audio.format"),
        ({"audio": {"format": "wav"}}, "modalities"),
        ({"messages": [{"role": "assistant", "audio": {"id": "audio_1"}}]}, "messages[0].audio"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ],
)  # fmt: skip
async def test_what_cannot_be_done_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], param: str
) -> None:
    async with serving(tmp_path) as bench:
        error = await bench.refused(CHAT, HELLO | change)
        assert (error["status"], error["param"]) == (400, param)
        assert bench.fleet.calls == []


OBEDIENT = GraphService(name="omni", tasks={"chat": f"{HERE}:ObedientAssistant"})
LOOK = {"type": "function", "function": {"name": "look"}}


async def test_calls_and_logprobs_reach_the_client_whole_and_streamed(tmp_path: Path) -> None:
    async with serving(tmp_path, services=(OBEDIENT,)) as bench:
        body = HELLO | {"tools": [LOOK], "tool_choice": "required"}
        choice = (await bench.json(CHAT, body))["choices"][0]
        function = {"name": "look", "arguments": "{}"}
        call = {"id": "call_1", "type": "function", "function": function}
        assert choice["message"]["content"] is None
        assert choice["message"]["tool_calls"] == [call]
        assert choice["finish_reason"] == "tool_calls"
        chunks = await bench.events(CHAT, body | {"stream": True})
        deltas = [c["choices"][0]["delta"] for c in chunks]
        assert join_calls(c for d in deltas for c in d.get("tool_calls", ())) == [call]
        assert len([d for d in deltas if "tool_calls" in d]) == 2
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        result = {"role": "tool", "tool_call_id": "call_1", "content": "an island"}
        told: list[Any] = [*HELLO["messages"], {"role": "assistant", "tool_calls": [call]}, result]
        assert (await bench.json(CHAT, HELLO | {"messages": told}))["choices"]
        deep: dict[str, Any] = {}
        for _ in range(600):
            deep = {"properties": deep}
        error = await bench.refused(CHAT, HELLO | {"tools": [deep]})
        assert (error["status"], error["param"]) == (400, "tools")
        told[1] = told[1] | {"tool_calls": [deep]}
        error = await bench.refused(CHAT, HELLO | {"messages": told})
        assert (error["status"], error["param"]) == (400, "messages[1].tool_calls")
        asked = HELLO | {"logprobs": True}
        choice = (await bench.json(CHAT, asked))["choices"][0]
        named = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert "".join(named) == choice["message"]["content"]
        chunks = await bench.events(CHAT, asked | {"stream": True})
        each = [c["choices"][0] for c in chunks]
        assert all(
            c["logprobs"]["content"][0]["token"] == c["delta"]["content"]
            for c in each
            if c["delta"].get("content")
        )


async def test_several_answers_are_runs_of_the_task_with_speech_too(tmp_path: Path) -> None:
    async with serving(tmp_path, services=(OBEDIENT,)) as bench:
        body = HELLO | {"n": 3, "modalities": ["text", "audio"], "audio": {"format": "pcm16"}}
        answer = await bench.json(CHAT, body)
        said = [c["message"]["audio"]["transcript"] for c in answer["choices"]]
        assert said[0] == "You said hello. "
        assert said[1:] == [f"You said hello. You said {n}. " for n in (1, 2)]
        # Every answer counts, and the prompt once.
        assert answer["usage"]["prompt_tokens"] == 7
        assert answer["usage"]["completion_tokens"] == 3 + 6 + 6
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        chunks = await bench.events(CHAT, streamed)
        assert chunks[-1]["usage"] == answer["usage"]
        for index, whole in enumerate(answer["choices"]):
            parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            audio = [c["delta"].get("audio", {}) for c in parts]
            assert "".join(a.get("transcript", "") for a in audio) == said[index]
            spoken = b"".join(base64.b64decode(a.get("data", "")) for a in audio)
            assert spoken == base64.b64decode(whole["message"]["audio"]["data"])
            assert [c["finish_reason"] for c in parts if c["finish_reason"]] == ["stop"]
        error = await bench.refused(CHAT, HELLO | {"n": 9})
        assert (error["status"], error["param"]) == (400, "n")
        # One that fails ends them all.
        bench.fleet.script["x-0"].append(TroubleError("bad_input", "no", "messages"))
        assert (await bench.refused(CHAT, body))["status"] == 400


async def test_what_a_task_returns_beside_openais_shape_is_sent(tmp_path: Path) -> None:
    service = GraphService(name="omni", tasks={"chat": f"{HERE}:MeaningfulAssistant"})
    async with serving(tmp_path, services=(service,)) as bench:
        extra = {"meaning": [3.0, 4.0, 5.0, 6.0], "mood": {"joy": 0.5}}
        answer = await bench.json(CHAT, HELLO)
        assert answer["choices"][0]["atoll"] == {"answer": extra}
        chunks = await bench.events(CHAT, HELLO | {"stream": True})
        with_more = [c["choices"][0] for c in chunks if "atoll" in c["choices"][0]]
        assert [(c["finish_reason"], c["atoll"]["answer"]) for c in with_more] == [("stop", extra)]


async def test_what_was_heard_is_sent_with_the_answer(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        answer = await bench.json(CHAT, HELLO | {"messages": message(SOUND)})
        assert answer["choices"][0]["atoll"] == {"answer": {"heard": ["1000 steps"]}}


@pytest.mark.parametrize(
    ("endpoint", "task", "field", "reason"),
    [
        ("chat", "RawAssistant", "tasks.chat.raw", "of type bytes, which cannot be sent"),
        ("speech", "MoodySpeaker", "tasks.speech.mood", "sends sound alone"),
        ("chat", "Wordless", "tasks.chat", "answers without text"),
        ("chat", "Texter", "tasks.chat", "answers with str"),
        ("images", "ToySpeech", "tasks.images", "answers without images"),
    ],
)
def test_a_task_whose_answer_cannot_be_sent_is_refused_when_it_is_loaded(
    tmp_path: Path, endpoint: Any, task: str, field: str, reason: str
) -> None:
    service = GraphService(name="omni", tasks={endpoint: f"{HERE}:{task}"})
    with pytest.raises(InputError, match=reason) as caught:
        Bench(tmp_path, services=(service,))
    assert caught.value.field == field


async def test_a_task_that_does_not_say_what_it_answers_is_checked_when_it_does(
    tmp_path: Path,
) -> None:
    service = GraphService(name="omni", tasks={"chat": f"{HERE}:Untyped"})
    async with serving(tmp_path, services=(service,)) as bench:
        error = await bench.refused(CHAT, HELLO)
        assert error["message"] == "tasks.chat.raw: bytes cannot be sent"


async def test_fields_without_effect_are_taken(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        harmless = {
            "user": "me", "n": 1, "tools": [], "presence_penalty": 0, "logit_bias": {},
            "response_format": {"type": "text"}, "metadata": {"a": "b"}, "top_p": 1,
        }  # fmt: skip
        assert (await bench.json(CHAT, HELLO | harmless))["choices"]


async def test_too_many_of_a_kind_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, limits=MediaLimits(images=1)) as bench:
        error = await bench.refused(CHAT, HELLO | {"messages": message(PICTURE, PICTURE)})
        assert "at most 1" in error["message"]


async def test_a_failure_before_the_first_piece_is_a_plain_error_with_its_path(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as bench:
        for name in bench.fleet.executors:
            bench.fleet.script[name].append(TroubleError("failed", "out of memory"))
        status, headers, data = await bench.ask(CHAT, HELLO | {"stream": True})
        assert status == 500
        assert "out of memory" in json.loads(data)["error"]["message"]
        assert headers["x-atoll-path"].startswith("toy-chat=")


async def test_a_failure_in_the_middle_is_an_event_and_not_an_end(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        speak = bench.fleet.executors["x-0"]["toy-voice"]

        def fail(inputs: dict[str, Any]) -> Any:
            if "two" in inputs["text"]:
                raise TroubleError("bad_input", "cannot say two", "voice")
            return speak(inputs)

        for functions in bench.fleet.executors.values():
            functions["toy-voice"] = fail
        body = {
            "model": "omni",
            "messages": message({"type": "text", "text": "one. two. three. four"}),
            "modalities": ["text", "audio"],
            "audio": {"format": "pcm16"},
            "stream": True,
        }
        _, _, data = await bench.ask(CHAT, body)
        assert b"[DONE]" not in data
        last = json.loads(data.decode().strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["message"] == "cannot say two"


async def test_a_client_that_leaves_leaves_nothing_behind(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        body = {"model": "omni", "messages": message(PICTURE, SOUND), "stream": True}
        request = Request(b"POST", CHAT.encode(), {})
        request.body = json.dumps(body).encode()
        answer = await bench.server.handle(request)
        assert not isinstance(answer, Response)
        async with contextlib.aclosing(answer.pieces) as pieces:
            await anext(pieces)
        page = (await bench.ask("/metrics", method="GET"))[2]
        assert b'status="499"} 1.0' in page


async def test_speech_as_a_file_and_streamed_as_wav_and_pcm(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        body = {"model": "omni", "input": "Good day. How are you?", "voice": "heart", "speed": 2.0}
        status, headers, data = await bench.ask("/v1/audio/speech", body)
        assert status == 200
        assert headers["x-atoll-path"] == "toy-voice=x-0"
        raw = (await bench.ask("/v1/audio/speech", body | {"response_format": "pcm"}))[2]
        assert data[44:] == raw
        # Whole, both lengths in the header are true, and so is what was used.
        assert struct.unpack("<I", data[4:8]) == (len(data) - 8,)
        assert struct.unpack("<I", data[40:44]) == (len(raw),)
        assert json.loads(headers["x-atoll-usage"]) == {
            "characters": 22,
            "speech_seconds": pytest.approx(len(raw) / 2 / RATE_HZ, abs=1e-3),
        }
        # Streamed, nobody knows them yet: both are the largest number, which readers take for that.
        _, headers, streamed = await bench.ask(
            "/v1/audio/speech", body | {"stream_format": "audio"}
        )
        assert json.loads(headers["x-atoll-usage"]) == {"characters": 22}
        assert streamed[44:] == raw
        assert streamed[4:8] == streamed[40:44] == b"\xff" * 4
        assert streamed[:4] + streamed[8:40] == data[:4] + data[8:40]
        assert len(raw) == 2 * 120 * (len("Good day.") + len("How are you?"))
        events = await bench.events(
            "/v1/audio/speech", body | {"response_format": "pcm", "stream_format": "sse"}
        )
        assert [e["type"] for e in events] == ["speech.audio.delta"] * 2 + ["speech.audio.done"]
        assert b"".join(base64.b64decode(e["audio"]) for e in events[:2]) == raw
        assert events[2]["usage"]["speech_seconds"] == pytest.approx(len(raw) / 2 / RATE_HZ)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": "  "}, "input"),
        ({"input": "x" * 5000}, "input"),
        ({"response_format": "aac"}, "response_format"),
        ({"speed": 9.0}, "speed"),
        ({"instructions": "whisper"}, "instructions"),
    ],
)
async def test_speech_that_cannot_be_spoken(tmp_path: Path, change: Any, param: str) -> None:
    async with serving(tmp_path) as bench:
        body = {"model": "omni", "input": "Hi.", "voice": "heart"}
        error = await bench.refused("/v1/audio/speech", body | change)
        assert (error["status"], error["param"]) == (400, param)


async def test_speech_as_mp3_and_opus(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="needs the extra 'media'")
    async with serving(tmp_path) as bench:
        body = {"model": "omni", "input": "Good day. How are you?", "voice": "heart"}
        for kind, begins in (("mp3", b"\xff"), ("opus", b"OggS")):
            asked = body | {"response_format": kind}
            _, headers, whole = await bench.ask("/v1/audio/speech", asked)
            assert whole.startswith(begins)
            assert json.loads(headers["x-atoll-usage"])["speech_seconds"] > 0
            events = await bench.events("/v1/audio/speech", asked | {"stream_format": "sse"})
            *deltas, done = events
            pieces = [base64.b64decode(event["audio"]) for event in deltas]
            assert all(pieces)
            assert pieces[0].startswith(begins)
            assert done["usage"]["speech_seconds"] > 0
            error = await bench.refused("/v1/audio/speech", asked | {"stream_format": "audio"})
            assert (error["status"], error["param"]) == (400, "stream_format")
            spoken = HELLO | {"modalities": ["text", "audio"], "audio": {"format": kind}}
            answer = await bench.json(CHAT, spoken)
            data = base64.b64decode(answer["choices"][0]["message"]["audio"]["data"])
            assert data.startswith(begins)


async def test_packed_speech_names_the_extra_where_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    async with serving(tmp_path) as bench:
        order: dict[str, Any] = {"model": "omni", "input": "Hi.", "response_format": "mp3"}
        error = await bench.refused("/v1/audio/speech", order)
        assert (error["status"], error["param"]) == (400, "response_format")
        assert "needs the extra 'media'" in error["message"]
        chat = HELLO | {"modalities": ["text", "audio"], "audio": {"format": "opus"}}
        error = await bench.refused(CHAT, chat)
        assert (error["status"], error["param"]) == (400, "audio.format")
        assert bench.fleet.calls == []


def form(file: bytes | None, **fields: str) -> tuple[bytes, dict[bytes, bytes]]:
    parts = [
        f'--B\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    if file is not None:
        head = b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
        parts.append(head + b"content-type: audio/wav\r\n\r\n" + file + b"\r\n")
    headers = {b"content-type": b"multipart/form-data; boundary=B"}
    return b"".join(parts) + b"--B--\r\n", headers


async def test_choices_are_listed_where_a_value_is_none_of_them(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        asked: list[tuple[str, Any, str, str]] = [
            (
                "/v1/audio/speech",
                {"input": "Hi", "response_format": "aac"},
                "",
                "use mp3 or opus or pcm or wav",
            ),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "Hi"}], "modalities": ["smell"]},
                "modalities[0]",
                "use audio or text",
            ),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": []}]},
                "messages[0].content",
                "length >= 1",
            ),
        ]
        for path, body, param, reason in asked:
            sent = json.dumps({"model": "omni", **body}).encode()
            status, _, data = await bench.ask(path, sent)
            error = json.loads(data)["error"]
            assert status == 400
            assert error["param"].startswith(param)
            assert reason in error["message"]


TRANSCRIBE = "/v1/audio/transcriptions"


async def test_transcriptions_in_every_format(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        body, headers = form(sound(1.0), model="omni", language="en")
        answer = await bench.json(TRANSCRIBE, body, headers=headers)
        assert answer["text"] == "2000 steps"
        assert answer["usage"] == {"type": "duration", "seconds": 1.0, "audio_seconds": 1.0}
        body, headers = form(sound(1.0), model="omni", response_format="text")
        _, more, data = await bench.ask(TRANSCRIBE, body, headers=headers)
        assert data == b"2000 steps\n"
        assert json.loads(more["x-atoll-usage"])["audio_seconds"] == 1.0
        body, headers = form(sound(1.0), model="omni", response_format="verbose_json")
        answer = await bench.json(TRANSCRIBE, body, headers=headers)
        assert answer["duration"] == 1.0
        assert answer["segments"] == [{"id": 0, "start": 0.0, "end": 1.5, "text": "2000 steps"}]
        body, headers = form(sound(1.0), model="omni", stream="true")
        events = await bench.events(TRANSCRIBE, body, headers=headers)
        assert [e["type"] for e in events] == ["transcript.text.delta", "transcript.text.done"]
        assert events[1]["text"] == "2000 steps"


@pytest.mark.parametrize(
    ("file", "fields", "param"),
    [
        (None, {"model": "omni"}, "file"),
        (b"no sound", {"model": "omni"}, "file"),
        (sound(), {}, "model"),
        (sound(), {"model": "omni", "response_format": "srt"}, "response_format"),
        (sound(), {"model": "omni", "prompt": "names"}, "prompt"),
        (sound(), {"model": "omni", "temperature": "0.5"}, "temperature"),
        (sound(), {"model": "omni", "whatever": "1"}, "whatever"),
    ],
)
async def test_forms_that_cannot_be_taken(
    tmp_path: Path, file: bytes | None, fields: dict[str, str], param: str
) -> None:
    async with serving(tmp_path) as bench:
        body, headers = form(file, **fields)
        error = await bench.refused(TRANSCRIBE, body, headers=headers)
        assert error["status"] == 400
        assert param in (error["param"] or error["message"])


async def test_broken_forms(tmp_path: Path) -> None:
    async with serving(tmp_path, limits=MediaLimits(audio_bytes=20_000)) as bench:
        body, headers = form(sound(), model="omni")
        for broken, kind in (
            (body[:-9], headers),
            (b"", headers),
            (body, {b"content-type": b"application/json"}),
            (body, {b"content-type": b"multipart/form-data"}),
            (b"--B\r\n\r\nx\r\n--B--\r\n", headers),
        ):
            error = await bench.refused(TRANSCRIBE, broken, headers=kind)
            assert error["status"] == 400
        big, headers = form(b"R" * 30_000, model="omni")
        assert (await bench.refused(TRANSCRIBE, big, headers=headers))["status"] == 413


async def test_pictures_are_drawn(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        body = {"model": "omni", "prompt": "hills", "n": 2, "seed": 7, "size": "64x32"}
        answer = await bench.json("/v1/images/generations", body)
        assert len(answer["data"]) == 2
        assert all(base64.b64decode(d["b64_json"]).startswith(b"\x89PNG") for d in answer["data"])
        assert answer["usage"]["image_pixels"] == 2 * 64 * 32
        assert answer["data"][0] != answer["data"][1]
        for change, param in (
            ({"response_format": "url"}, "response_format"),
            ({"n": 9}, "n"),
            ({"size": "1024x1024"}, "size"),
            ({"style": "vivid"}, "style"),
        ):
            error = await bench.refused("/v1/images/generations", body | change)
            assert (error["status"], error["param"]) == (400, param)


async def test_texts_are_embedded(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        body: dict[str, Any] = {"model": "omni", "input": ["a b", "abcd"]}
        answer = await bench.json("/v1/embeddings", body)
        assert [d["embedding"][0] for d in answer["data"]] == [3.0, 4.0]
        assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
        packed = await bench.json(
            "/v1/embeddings", {"model": "omni", "input": "a b", "encoding_format": "base64"}
        )
        vector = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
        assert vector.tolist() == [3.0, 4.0, 5.0, 6.0]
        assert await bench.json("/v1/embeddings", body | {"dimensions": 4})
        for change, param in (
            ({"dimensions": 8}, "dimensions"),
            ({"input": ""}, "input"),
            ({"input": ["a", ""]}, "input[1]"),
            ({"input": []}, "input"),
            ({"input": [1, 2]}, "input[0]"),
        ):
            error = await bench.refused("/v1/embeddings", body | change)
            assert (error["status"], error["param"]) == (400, param)


async def test_pages(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        models = await bench.json("/v1/models", method="GET")
        entry = models["data"][0]
        assert entry["id"] == "omni"
        assert entry["modalities"]["output"] == ["text", "audio", "image"]
        assert CHAT in entry["endpoints"]
        assert await bench.json("/health", method="GET") == {}
        bench.fleet.down = {"x-0", "x-1"}
        error = await bench.refused("/health", None, method="GET")
        assert error["status"] == 503
        assert "toy-chat" in error["message"]
        status = await bench.json("/atoll/v1/status", method="GET")
        assert [e["connected"] for e in status["executors"]] == [False, False]
        assert (await bench.refused("/v1/nothing", None, method="GET"))["status"] == 404
        assert (await bench.refused(CHAT, None, method="GET"))["status"] == 405


async def test_components_that_nobody_is_configured_for_do_not_make_a_graph_server_unwell(
    tmp_path: Path,
) -> None:
    components = tuple(name for name in FUNCTIONS if name != "toy-brush")
    one = ExecutorAddress(id="x-0", address="127.0.0.1:1", components=components)
    async with serving(tmp_path, executors=(one,)) as bench:
        assert await bench.json("/health", method="GET") == {}
        assert bench.server.unserved() == {"omni": ["toy-brush"]}
        body = {"model": "omni", "prompt": "hills"}
        error = await bench.refused("/v1/images/generations", body)
        assert (error["status"], error["code"]) == (503, "no_executor")


async def test_models_that_are_not_here(tmp_path: Path) -> None:
    service = GraphService(name="omni", tasks={"chat": TASKS["chat"]})
    async with serving(tmp_path, services=(service,)) as bench:
        assert (await bench.refused(CHAT, HELLO | {"model": "x"}))["code"] == "model_not_found"
        body = {"model": "omni", "input": "a"}
        error = await bench.refused("/v1/embeddings", body)
        assert (error["status"], error["param"]) == (404, "model")


async def test_traces_show_where_time_went(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        bench.fleet.script["x-0"].append(TroubleError("overloaded", "full"))
        answer = await bench.json(
            CHAT, HELLO | {"messages": message(SOUND)}, headers={b"x-atoll-trace": b"1"}
        )
        trace = answer["atoll"]["trace"]
        assert [i["component"] for i in trace["invocations"]] == [
            "toy-encoder", "toy-decoder", "toy-chat",
        ]  # fmt: skip
        first = trace["invocations"][0]
        assert (first["executor"], first["attempts"]) == ("x-1", 2)
        assert first["troubles"] == ["x-0: overloaded"]
        assert first["input_bytes"] == 4 * 8000
        kept = await bench.json(f"/atoll/v1/traces/{trace['id']}", method="GET")
        assert kept["status"] == 200
        assert kept["invocations"] == trace["invocations"]
        assert (await bench.refused("/atoll/v1/traces/x", None, method="GET"))["status"] == 404
        plain = await bench.json(CHAT, HELLO)
        assert "atoll" not in plain


async def test_only_so_many_requests_and_bytes_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, max_requests=1) as bench:
        waiting = asyncio.Event()

        async def hold(executor: str, order: Any) -> AsyncIterator[Any]:
            await waiting.wait()
            yield {"text": "", "token_ids": []}
            raise TroubleError("bad_input", "enough")

        bench.fleet.stream = hold  # type: ignore[method-assign, assignment]
        first = asyncio.create_task(bench.refused(CHAT, HELLO))
        while bench.server.status()["running"] == 0:
            await asyncio.sleep(0)
        error = await bench.refused(CHAT, HELLO)
        assert (error["status"], error["code"]) == (503, "overloaded")
        waiting.set()
        assert (await first)["status"] == 400
        bench.server.intake.max_bytes = 10
        error = await bench.refused(CHAT, HELLO | {"messages": message(PICTURE)})
        assert (error["status"], error["code"]) == (503, "overloaded")


async def test_a_request_ends_when_its_time_is_over(tmp_path: Path) -> None:
    async with serving(tmp_path, request_s=0.01) as bench:

        async def never(executor: str, order: Any) -> AsyncGenerator[Any, None]:
            await asyncio.Event().wait()
            yield

        bench.fleet.stream = never  # type: ignore[method-assign]
        assert (await bench.refused(CHAT, HELLO))["status"] == 504
        assert (await bench.refused(CHAT, HELLO | {"stream": True}))["status"] == 504
