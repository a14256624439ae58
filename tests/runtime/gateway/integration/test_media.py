"""Speech, transcripts, pictures and chat with both, through the gateway, with graph servers that fail."""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import openai
import pytest

from atoll.runtime.gateway.settings import GatewayLimits
from atoll.runtime.media.media_limits import MediaLimits
from tests.runtime.gateway.engine import Fault
from tests.runtime.gateway.graph_server import (
    PATH,
    PIECE,
    PIECES,
    SOUND,
    SPOKEN,
    TEXT,
    WAV_HEADER,
    ScriptedGraphServer,
)
from tests.runtime.gateway.harness import CHAT, QUICK, Bench, chat, running
from tests.runtime.gateway.test_form import FILE, MODEL, TYPE, form

SPEECH, IMAGES = "/v1/audio/speech", "/v1/images/generations"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
HEARD = ('name="model"', b"m")
SAY = {"model": "m", "input": "hello", "voice": "heart"}
FORM = f"content-type: {TYPE.decode()}\r\n"


def graph_servers(*servers: ScriptedGraphServer, **more: Any) -> AbstractAsyncContextManager[Bench]:
    return running(servers or [ScriptedGraphServer()], **more)


def values(bench: Bench) -> list[tuple[float, float, int]]:
    return [(r.audio_seconds, r.speech_seconds, r.image_pixels) for r in bench.records]


def sdk_of(bench: Bench) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{bench.port}/v1", api_key="x", max_retries=0
    )


# OpenAI's own client


async def test_the_sdk_speaks_hears_draws_and_embeds() -> None:
    async with graph_servers() as bench:
        async with sdk_of(bench) as sdk:
            spoken = await sdk.audio.speech.create(
                model="m", voice="heart", input="hello", response_format="wav"
            )
            assert spoken.content == WAV_HEADER + SOUND
            asking = sdk.audio.speech.with_streaming_response.create(
                model="m", voice="heart", input="hello", response_format="pcm"
            )
            async with asking as streamed:
                assert streamed.headers["content-type"] == "audio/pcm"
                assert streamed.headers["x-atoll-path"] == PATH
                assert "x-internal" not in streamed.headers
                assert b"".join([piece async for piece in streamed.iter_bytes()]) == SOUND
            heard = await sdk.audio.transcriptions.create(model="m", file=("a.wav", b"RIFF" * 999))
            assert heard.text == "".join(TEXT)
            events = await sdk.audio.transcriptions.create(
                model="m", file=("a.wav", b"RIFF"), stream=True
            )
            said = [event async for event in events]
            assert [e.delta for e in said if e.type == "transcript.text.delta"] == TEXT
            drawn = await sdk.images.generate(model="m", prompt="the sea", n=2)
            assert drawn.data is not None
            assert len(drawn.data) == 2
            vectors = await sdk.embeddings.create(model="m", input=["a"], encoding_format="float")
            assert vectors.data[0].embedding == [0.5, 0.25]
        await bench.settled()
        assert values(bench) == [
            (0.0, 1.0, 0),
            (0.0, 1.0, 0),
            (2.5, 0.0, 0),
            (2.5, 0.0, 0),
            (0.0, 0.0, 2 * 128 * 128),
            (0.0, 0.0, 0),
        ]
        assert not any(record.estimated for record in bench.records)
        server = bench.engines[0]
        assert server.seen[2].raw.count(b"RIFF") == 999
        assert "multipart/form-data" in server.seen[2].headers["content-type"]
        page = (await bench.admin("/metrics")).body.decode()
        assert 'atoll_gateway_audio_seconds_total{model="m"} 5.0' in page
        assert 'atoll_gateway_speech_seconds_total{model="m"} 2.0' in page
        assert 'atoll_gateway_image_pixels_total{model="m"} 32768.0' in page


async def test_the_sdk_chats_with_pictures_and_sound() -> None:
    picture = "data:image/png;base64," + base64.b64encode(b"png").decode()
    messages: Any = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what is this?"},
                {"type": "image_url", "image_url": {"url": picture}},
                {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            ],
        }
    ]
    wanted: Any = {"modalities": ["text", "audio"], "audio": {"voice": "heart", "format": "pcm16"}}
    async with graph_servers() as bench:
        async with sdk_of(bench) as sdk:
            whole = await sdk.chat.completions.create(model="m", messages=messages, **wanted)
            assert whole.choices[0].message.audio is not None
            assert whole.choices[0].message.audio.data == SPOKEN
            stream = await sdk.chat.completions.create(
                model="m", messages=messages, stream=True, **wanted
            )
            chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "".join(TEXT)
        spoken = [getattr(c.choices[0].delta, "audio", None) for c in chunks]
        assert [audio.data for audio in spoken if audio] == [SPOKEN] * len(TEXT)
        await bench.settled()
        assert values(bench) == [(0.5, 2.0, 77)] * 2
        assert bench.engines[0].seen[0].body["messages"] == messages


# When a graph server fails


KINDS = [(SPEECH, "binary"), (SPEECH, "sse"), (TRANSCRIPTIONS, ""), (IMAGES, "")]


@pytest.mark.parametrize(
    ("what", "path", "kind"),
    [
        (what, path, kind)
        for what in ("503", "die_before_head", "die_after")
        for path, kind in KINDS
        # Pictures come in one piece.
        if what != "die_after" or path != IMAGES
    ],
)
async def test_before_the_first_byte_another_graph_server_answers(
    what: str, path: str, kind: str
) -> None:
    # Dying after 0 pieces: the headers were there, and nothing of the sound.
    body: Any = {
        SPEECH: SAY | ({"stream_format": "sse"} if kind == "sse" else {}),
        TRANSCRIPTIONS: form(HEARD, FILE, ('name="stream"', b"true")),
        IMAGES: {"model": "m", "prompt": "sea"},
    }[path]
    async with graph_servers(ScriptedGraphServer(), ScriptedGraphServer()) as bench:
        for engine in bench.engines[:1]:
            engine.faults.append(Fault(what))
        for _ in range(2):
            reply = await bench.post(path, body, FORM if path == TRANSCRIPTIONS else "")
            assert reply.status == 200
        await bench.settled()
        # Whatever failed, what was used counts once.
        assert len(set(values(bench))) == 1
        assert sum(len(r.backends) for r in bench.records) in (2, 3)
        assert all(r.outcome == "ok" for r in bench.records)


async def test_sound_that_breaks_off_is_cut_and_never_made_whole() -> None:
    async with graph_servers(ScriptedGraphServer()) as bench:
        bench.engines[0].faults.append(Fault("die_after", 4))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)) as broken:
            await bench.post(SPEECH, SAY | {"response_format": "pcm"})
        assert broken.type is not None
        await bench.settled()
        (record,) = bench.records
        assert (record.outcome, record.estimated) == ("truncated", True)
        assert record.speech_seconds == pytest.approx(0.4)
        assert len(record.backends) == 1
        assert not bench.gateway.relays
        assert bench.gateway.pool.members["e0"].inflight == 0


async def test_cut_sound_reaches_the_client_as_an_error() -> None:
    async with graph_servers(ScriptedGraphServer()) as bench:
        bench.engines[0].faults.append(Fault("die_after", 4))
        async with sdk_of(bench) as sdk:
            with pytest.raises(openai.APIConnectionError):
                await sdk.audio.speech.create(
                    model="m", voice="heart", input="hello", response_format="wav"
                )


async def test_events_that_break_off_end_with_an_error() -> None:
    async with graph_servers(ScriptedGraphServer()) as bench:
        bench.engines[0].faults += [Fault("die_after", 2)] * 2
        spoken = await bench.post(SPEECH, SAY | {"stream_format": "sse"})
        heard = await bench.post(
            TRANSCRIPTIONS, form(HEARD, FILE, ('name="stream"', b"true")), FORM
        )
        events = [json.loads(event) for event in spoken.events]
        assert [e.get("type") for e in events[:-1]] == ["speech.audio.delta"] * 2
        assert events[-1]["error"]["code"] == "stream_interrupted"
        events = [json.loads(event) for event in heard.events]
        assert [e.get("delta") for e in events[:-1]] == TEXT[:2]
        assert events[-1]["error"]["code"] == "stream_interrupted"
        await bench.settled()
        assert [r.outcome for r in bench.records] == ["truncated"] * 2


@pytest.mark.parametrize("temperature", [0, 1])
async def test_a_chat_that_speaks_is_not_resumed(temperature: int) -> None:
    async with graph_servers(
        ScriptedGraphServer(kind="vllm"), ScriptedGraphServer(kind="vllm")
    ) as bench:
        bench.engines[0].faults.append(Fault("die_after", 5))
        replies = [
            await bench.post(CHAT, chat(stream=True, temperature=temperature)) for _ in range(2)
        ]
        (broken,) = [r for r in replies if not r.events[-1].startswith("[DONE]")]
        assert json.loads(broken.events[-1])["error"]["code"] == "stream_interrupted"
        assert SPOKEN in broken.body.decode()
        await bench.settled()
        (record,) = [r for r in bench.records if r.outcome == "truncated"]
        assert record.backends == ("e0",)
        assert record.speech_seconds == pytest.approx(2 * 4.0)
        assert bench.engines[1].seen[0].body["messages"] == chat()["messages"]
        assert len(bench.engines[1].seen) == 1


async def test_a_client_that_leaves_pays_for_what_it_heard() -> None:
    async with graph_servers(ScriptedGraphServer(step_s=0.05)) as bench:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
        raw = json.dumps(SAY | {"response_format": "pcm"}).encode()
        writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\n" % SPEECH.encode())
        writer.write(b"content-length: %d\r\n\r\n%b" % (len(raw), raw))
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(PIECE))
        writer.transport.abort()
        await bench.settled()
        (record,) = bench.records
        assert (record.outcome, record.estimated) == ("cancelled", True)
        assert 0.0 < record.speech_seconds < 1.0


async def test_a_silent_graph_server_is_given_up() -> None:
    impatient = replace(QUICK, first_token_s=0.1, between_tokens_s=0.1)
    async with graph_servers(ScriptedGraphServer(step_s=0.3), deadlines=impatient) as bench:
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await bench.post(SPEECH, SAY)
        await bench.settled()
        assert bench.records[0].outcome == "truncated"


async def test_sound_that_waits_for_an_executor_is_not_given_up() -> None:
    # Nothing in sound can say that it goes on: a pause is longer than one between tokens may be.
    patient = replace(QUICK, first_token_s=600.0, between_tokens_s=0.05)
    async with graph_servers(ScriptedGraphServer(step_s=0.1), deadlines=patient) as bench:
        whole = await bench.post(SPEECH, SAY)
        assert whole.status == 200
        assert bench.records[0].outcome == "ok"


@pytest.mark.parametrize("status", [404, 405])
async def test_an_endpoint_that_a_graph_server_lacks_is_its_answer(status: int) -> None:
    async with graph_servers(ScriptedGraphServer()) as bench:
        bench.engines[0].faults += [Fault(str(status))] * 20
        for _ in range(20):
            reply = await bench.post(SPEECH, SAY)
            assert reply.status == status
            assert reply.json["error"]["message"] == "not here"
        member = bench.gateway.pool.members["e0"]
        assert member.state == "up"
        assert (await bench.post(SPEECH, SAY)).status == 200


# What graph servers say beside their answer


@pytest.mark.parametrize(
    ("notes", "kind", "expected"),
    [
        ('x-atoll-usage: {"speech_seconds": 0.9, "prompt_tokens": 5}\r\n', "wav", (0.9, 5)),
        ('x-atoll-usage: {"characters": 5}\r\nx-atoll-rate-hz: 48000\r\n', "pcm", (0.5, 0)),
        ("x-atoll-rate-hz: 0\r\n", "pcm", (1.0, 0)),
        ("x-atoll-rate-hz: -5\r\nx-atoll-usage: nonsense\r\n", "wav", (1.0, 0)),
        ('x-atoll-usage: {"speech_seconds": -1, "prompt_tokens": "x"}\r\n', "pcm", (1.0, 0)),
        ('x-atoll-usage: {"speech_seconds": 0.7}\r\n', "mp3", (0.7, 0)),
        ("", "mp3", (0.0, 0)),
    ],
)
async def test_speech_is_measured(notes: str, kind: str, expected: tuple[float, int]) -> None:
    async with graph_servers(ScriptedGraphServer(notes=notes)) as bench:
        reply = await bench.post(SPEECH, SAY | {"response_format": kind})
        assert reply.headers["content-type"] == f"audio/{kind}"
        assert reply.headers["x-atoll-path"] == PATH
        assert not {"x-internal", "x-atoll-usage", "x-atoll-rate-hz"} & set(reply.headers)
        await bench.settled()
        (record,) = bench.records
        assert (record.speech_seconds, record.prompt_tokens) == expected


async def test_an_alias_renames_the_model_inside_a_form() -> None:
    async with graph_servers(aliases={"whisper-1": "m"}) as bench:
        raw = form(FILE, ('name="model"', b"whisper-1"), ('name="language"', b"en"))
        assert (await bench.post(TRANSCRIPTIONS, raw, FORM)).status == 200
        assert bench.engines[0].seen[0].raw == raw.replace(b"whisper-1", b"m")
        assert (await bench.post(TRANSCRIPTIONS, form(FILE, MODEL), FORM)).status == 404


# What strangers send


async def test_nothing_hostile_reaches_a_graph_server() -> None:
    url = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}
    async with graph_servers() as bench:
        for path, body, headers, code in (
            (CHAT, chat(messages=[{"role": "user", "content": [url]}]), "", "remote_url_refused"),
            (SPEECH, SAY | {"input": "x" * 5000}, "", "string_above_max_length"),
            (TRANSCRIPTIONS, form(HEARD, FILE)[:-6], FORM, "invalid_form"),
            (TRANSCRIPTIONS, form(HEARD, FILE), "", "invalid_form"),
        ):
            reply = await bench.post(path, body, headers)
            assert (reply.status, reply.json["error"]["code"]) == (400, code), path
            assert set(reply.json["error"]) == {"message", "type", "param", "code"}
        assert (await bench.get(TRANSCRIPTIONS)).status == 405
        assert bench.engines[0].seen == []


@pytest.mark.parametrize(("path", "size"), [(TRANSCRIPTIONS, 100_000_000), (SPEECH, 40 * 2**20)])
async def test_large_bodies_are_refused_before_they_come(path: str, size: int) -> None:
    async with graph_servers() as bench:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{FORM}content-length: {size}\r\n\r\n--"
        reply = await bench.ask(head.encode())
        assert reply.status == 413
        assert reply.json["error"]["code"] == "request_too_large"


async def test_a_form_may_be_larger_than_other_bodies_and_no_larger() -> None:
    limits = GatewayLimits(body_bytes=20_000, media_body_bytes=60_000)

    async def send(bench: Bench, path: str, size: int) -> tuple[int, int]:
        """Send a body in chunks without saying how long it is; return the status and what was taken."""
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
        writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\n{FORM}".encode())
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        raw = form(HEARD, ('name="file"; filename="x"', bytes(size)))
        most = 0
        for at in range(0, len(raw), 5000):
            piece = raw[at : at + 5000]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await asyncio.sleep(0)
            most = max(most, bench.gateway.buffered)
        writer.write(b"0\r\n\r\n")
        status = int((await reader.readline()).split()[1])
        writer.close()
        return status, most

    async with graph_servers(limits=limits) as bench:
        assert (await send(bench, TRANSCRIPTIONS, 50_000))[0] == 200
        status, most = await send(bench, TRANSCRIPTIONS, 3_000_000)
        assert status == 413
        assert most < 60_000 + 2 * 256 * 2**10
        assert (await send(bench, IMAGES, 50_000))[0] == 413
        await asyncio.sleep(0.05)
        assert bench.gateway.buffered == 0


async def test_limits_of_media_are_settings() -> None:
    async with graph_servers(
        media=MediaLimits(speech_chars=2), limits=GatewayLimits(content_parts=2)
    ) as bench:
        assert (await bench.post(SPEECH, SAY)).status == 400
        parts = [{"type": "text", "text": "x"}] * 3
        reply = await bench.post(CHAT, chat(messages=[{"role": "user", "content": parts}]))
        assert reply.json["error"]["code"] == "too_many_parts"


async def test_pieces_stay_pieces() -> None:
    async with graph_servers() as bench:
        reply = await bench.post(SPEECH, SAY | {"response_format": "pcm"})
        assert reply.headers["transfer-encoding"] == "chunked"
        assert len(reply.body) == len(PIECE) * PIECES
        assert bench.records == [] or bench.records[0].first_token_s is not None
