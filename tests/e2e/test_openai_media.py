"""OpenAI's SDK, and clients that mean no good, against a fleet of real components: heard, seen, drawn, said.

One test, since a fleet of three processes with their weights is brought up for it, once.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import urllib.error
import urllib.request
from importlib.util import find_spec
from typing import Any

import openai
import pytest

from atoll.api.demo.asking import draw_circle
from tests.e2e.media_fleet import (
    EMBEDDINGS,
    MODEL,
    BadRequest,
    Json,
    MediaFleet,
    bad_requests,
    media_fleet,
    need_weights,
)

pytestmark = pytest.mark.engine
SAID = "The quick brown fox jumps over the lazy dog."
WORDS = ("quick", "brown", "fox", "lazy", "dog")
REALTIME = find_spec("websockets") is not None
"""OpenAI's SDK speaks `/v1/realtime` by that package."""
GROWTH_BYTES = 200 * 2**20


@pytest.mark.slow
def test_a_fleet_of_real_components_over_the_sdk() -> None:
    need_weights()
    with media_fleet() as fleet:
        sdk = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="x", max_retries=0, timeout=120)
        with sdk:
            sound = speech_is_spoken(sdk)
            speech_is_heard(sdk, sound)
            long_speech_is_heard_by_the_piece(sdk, sound)
            pictures_are_drawn(sdk)
            texts_have_meaning(sdk)
            pictures_are_seen(sdk)
            a_spoken_question_is_answered_aloud(sdk, sound)
            answers_have_forms_and_calls(sdk)
            what_is_used_is_in_the_ledger(fleet, sound)
            nothing_bad_gets_in(fleet)
            speech_is_heard(sdk, sound)
            answered_alike_on_one_connection(fleet)


def speech_is_spoken(sdk: openai.OpenAI) -> bytes:
    order: Any = {"model": MODEL, "voice": "heart", "input": SAID}
    whole = sdk.audio.speech.with_raw_response.create(**order, response_format="wav")
    assert whole.headers["x-atoll-path"]
    data: bytes = whole.content
    assert data[:4] == b"RIFF"
    assert int.from_bytes(data[40:44], "little") == len(data) - 44
    assert 48_000 < len(data) - 44 < 10 * 48_000
    with sdk.audio.speech.with_streaming_response.create(
        **order | {"input": f"{SAID} {SAID}"}, response_format="pcm"
    ) as streamed:
        pieces = list(streamed.iter_bytes())
    assert b"".join(pieces)[: len(data) - 44] == data[44:], "the first sentence is the same"
    return data


def speech_is_heard(sdk: openai.OpenAI, sound: bytes) -> None:
    heard: Any = sdk.audio.transcriptions.create(model=MODEL, file=("said.wav", sound))
    assert all(word in heard.text.lower() for word in WORDS), heard.text
    assert heard.usage.seconds == pytest.approx((len(sound) - 44) / 48_000, abs=0.01)


def long_speech_is_heard_by_the_piece(sdk: openai.OpenAI, sound: bytes) -> None:
    from tests.runtime.media.samples import wav

    once = sound[44:] + bytes(24_000)
    times = 30 * 48_000 // len(once) + 1
    told = sdk.audio.transcriptions.create(
        model=MODEL,
        file=("long.wav", wav(once * times, rate_hz=24_000)),
        response_format="verbose_json",
    )
    assert told.duration == pytest.approx(times * len(once) / 48_000, abs=0.01)
    assert told.segments is not None
    assert len(told.segments) >= 2
    assert all(one.end - one.start <= 30.0 for one in told.segments)
    assert told.text == " ".join(one.text for one in told.segments)
    assert told.text.lower().count("fox") >= times - 1, told.text


def pictures_are_drawn(sdk: openai.OpenAI) -> None:
    order: Any = {"model": MODEL, "prompt": "an island", "response_format": "b64_json"}
    drawn: Any = sdk.images.generate(**order, size="128x128", extra_body={"steps": 1})
    data = base64.b64decode(drawn.data[0].b64_json)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (128, 128)
    assert drawn.usage.image_pixels == 128 * 128


def texts_have_meaning(sdk: openai.OpenAI) -> None:
    found = sdk.embeddings.create(
        model=MODEL,
        input=["A cat sleeps.", "A kitten is resting.", "The stock market fell."],
        encoding_format="float",
    )
    cat, kitten, market = (one.embedding for one in found.data)
    assert _dot(cat, kitten) > _dot(cat, market) + 0.2
    assert found.usage.total_tokens > 0


def _dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def pictures_are_seen(sdk: openai.OpenAI) -> None:
    url = f"data:image/png;base64,{base64.b64encode(draw_circle()).decode()}"
    asked = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What colour is the circle?"},
    ]
    messages: Any = [{"role": "user", "content": asked}]
    answer: Any = sdk.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=16, temperature=0
    )
    assert "red" in answer.choices[0].message.content.lower(), answer
    assert answer.usage.image_pixels == 224 * 224
    assert answer.usage.prompt_tokens_details.image_tokens > 0


def a_spoken_question_is_answered_aloud(sdk: openai.OpenAI, sound: bytes) -> None:
    data = base64.b64encode(sound).decode()
    asked = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]
    order: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": asked}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "heart", "format": "pcm16"},
        "max_tokens": 24,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    stream: Any = sdk.chat.completions.create(**order, stream=True)
    assert stream.response.headers["x-atoll-path"]
    text, transcript, spoken = "", "", b""
    usage: Any = None
    for part in stream:
        usage = part.usage or usage
        for choice in part.choices:
            text += choice.delta.content or ""
            if choice.delta.audio is not None:
                transcript += choice.delta.audio.transcript or ""
                spoken += base64.b64decode(choice.delta.audio.data or "")
    assert transcript
    assert not text, "what is spoken is written once, as its transcript"
    assert len(spoken) > 24_000
    assert usage.audio_seconds == pytest.approx((len(sound) - 44) / 48_000, abs=0.01)
    assert usage.speech_seconds == pytest.approx(len(spoken) / 48_000, abs=0.01)


def answers_have_forms_and_calls(sdk: openai.OpenAI) -> None:
    colours = ["red", "green", "blue"]
    schema: dict[str, Any] = {"type": "object", "properties": {"colour": {"enum": colours}}}
    schema |= {"required": ["colour"], "additionalProperties": False}
    order: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What colour is the sky?"}],
        "max_tokens": 40,
        "temperature": 0,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = sdk.chat.completions.create(**order, response_format=form, logprobs=True, n=2)
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert json.loads(choice.message.content or "")["colour"] in colours
        assert choice.logprobs is not None
        said = "".join(entry.token for entry in choice.logprobs.content or ())
        assert said.startswith(choice.message.content or "")
    paint: Any = {"type": "function", "function": {"name": "paint", "parameters": schema}}
    called: Any = sdk.chat.completions.create(
        **order | {"max_tokens": 80},
        tools=[paint],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["colour"] in colours
    assert called.choices[0].finish_reason == "tool_calls"


def what_is_used_is_in_the_ledger(fleet: MediaFleet, sound: bytes) -> None:
    asyncio.run(_with_keys(fleet, sound))


async def _with_keys(fleet: MediaFleet, sound: bytes) -> None:
    """Ask through a gateway with keys before the same graph server, and look at what it counted."""
    import sqlalchemy as sa

    from atoll.runtime.accounts import schema
    from atoll.runtime.accounts.accounts import Accounts
    from atoll.runtime.accounts.api_keys import NewKey
    from atoll.runtime.accounts.database import Database
    from atoll.runtime.gateway.app import Gateway
    from atoll.runtime.gateway.settings import GatewaySettings
    from atoll.runtime.pool.member import Backend
    from atoll.runtime.pool.pool import BackendPool

    url = f"sqlite:///{fleet.folder}/keys.db"
    accounts = await Accounts.open(url, journal=fleet.folder / "journal", refresh_s=60.0)
    database = await Database.open(url)
    text, _ = await database.create_key(NewKey.parse({"name": "n"}))
    await accounts.sync()
    pool = BackendPool()
    pool.add(Backend(id="graph-server", url=fleet.graph_server, models=(MODEL,), kind="tasks"))
    gateway = Gateway(pool, GatewaySettings(port=0), accounts=accounts)
    _, port = await gateway.start()
    rows: list[Any] = []
    try:
        base = f"http://127.0.0.1:{port}/v1"
        stranger = openai.AsyncOpenAI(base_url=base, api_key="sk-none", max_retries=0)
        async with stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.embeddings.create(model=MODEL, input="Hi")
        async with openai.AsyncOpenAI(base_url=base, api_key=text, max_retries=0) as sdk:
            await sdk.audio.transcriptions.create(model=MODEL, file=("said.wav", sound))
            drawn: Any = {"model": MODEL, "prompt": "x", "response_format": "b64_json"}
            await sdk.images.generate(**drawn, extra_body={"steps": 1})
            spoken = await sdk.audio.speech.create(
                model=MODEL, voice="heart", input="Hello.", response_format="pcm"
            )
            if REALTIME:
                await _talk(sdk, sound[44:])
        for _ in range(200):
            await accounts.sync()
            async with database.reading() as connection:
                rows = list(await connection.execute(sa.select(schema.operations)))
            if len(rows) == 3 + REALTIME:
                break
            await asyncio.sleep(0.05)
    finally:
        await gateway.close()
        await accounts.close()
        await database.close()
    heard_ms = round(1000 * (len(sound) - 44) / 48_000)
    spoken_ms = round(1000 * len(spoken.content) / 48_000)
    counted = sorted((row.audio_ms, row.speech_ms, row.image_pixels) for row in rows)
    assert counted[0] == (0, 0, 128 * 128)
    assert counted[1] == (0, pytest.approx(spoken_ms, abs=2), 0)
    heard_alone = [each for each in counted if each[0] and not each[1]]
    assert heard_alone == [(pytest.approx(heard_ms, abs=2), 0, 0)]
    # A turn of a conversation is a chat: heard from a little before the first word on, and spoken.
    talked = [each for each in counted if each[0] and each[1]]
    assert len(talked) == REALTIME
    assert all(heard_ms / 2 < each[0] < heard_ms + 1500 for each in talked)


async def _talk(sdk: openai.AsyncOpenAI, sound: bytes) -> None:
    """Say something in a session: its end is noticed, what was said is heard and answered aloud."""
    settings: Any = {
        "type": "realtime",
        "max_output_tokens": 12,
        "audio": {"input": {"transcription": {"model": MODEL}}},
    }
    came = sound + bytes(2 * 24_000)
    async with sdk.realtime.connect(model=MODEL) as session:
        await session.session.update(session=settings)
        for at in range(0, len(came), 9600):
            audio = base64.b64encode(came[at : at + 9600]).decode()
            await session.input_audio_buffer.append(audio=audio)
        seen: dict[str, Any] = {}
        async with asyncio.timeout(120):
            async for event in session:
                assert event.type != "error", event
                seen[event.type] = event
                if event.type == "response.done":
                    break
    heard = seen["conversation.item.input_audio_transcription.completed"].transcript.lower()
    assert all(word in heard for word in WORDS), heard
    assert seen["response.done"].response.status in ("completed", "incomplete")
    said = seen["response.output_audio_transcript.done"].transcript
    assert said
    assert len(base64.b64decode(seen["response.output_audio.delta"].delta)) > 2_000


def nothing_bad_gets_in(fleet: MediaFleet) -> None:
    before = fleet.memory()
    wrong = []
    for bad in bad_requests(draw_circle()):
        status, answer = _send(fleet.url, bad)
        error = answer.get("error")
        if status == 200 and 200 in bad.status:
            continue
        if (
            status not in bad.status
            or not isinstance(error, dict)
            or set(error) != {"message", "type", "param", "code"}
            or error["type"] != "invalid_request_error"
            or not str(error["param"] or "").startswith(bad.param)
            or bad.code not in (None, error["code"])
        ):
            wrong.append(f"{bad.name}: {status} {str(answer)[:300]}")
    assert not wrong, "\n".join(wrong)
    after = fleet.memory()
    assert set(after) == set(before), "no process died"
    grown = {pid: (after[pid] - before[pid]) // 2**20 for pid in before}
    assert max(grown.values()) < GROWTH_BYTES // 2**20, grown


def _send(url: str, bad: BadRequest) -> tuple[int, Json]:
    body, kind = json.dumps({"model": MODEL, **bad.body}).encode(), "application/json"
    if bad.file is not None:
        mark = secrets.token_hex(16)
        parts = [f'--{mark}\r\ncontent-disposition: form-data; name="model"\r\n\r\n{MODEL}\r\n']
        named = 'name="file"; filename="a.wav"'
        parts.append(f"--{mark}\r\ncontent-disposition: form-data; {named}\r\n\r\n")
        body = "".join(parts).encode() + bad.file + f"\r\n--{mark}--\r\n".encode()
        kind = f"multipart/form-data; boundary={mark}"
    asked = urllib.request.Request(url + bad.path, body, {"content-type": kind})
    try:
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def answered_alike_on_one_connection(fleet: MediaFleet) -> None:
    """Two requests at once on one connection, a bad one between: answered in order."""
    asyncio.run(_pipelined(fleet))


async def _pipelined(fleet: MediaFleet) -> None:
    port = int(fleet.url.rpartition(":")[2])
    good = json.dumps({"model": MODEL, "input": "Hi"}).encode()
    sent = b""
    for body in (good, b'{"model": NaN', good):
        head = f"POST {EMBEDDINGS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        sent += head.encode() + body
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    found = []
    for _ in range(3):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(line for line in head.splitlines() if line.startswith("content-length"))
        await reader.readexactly(int(length.partition(":")[2]))
        found.append(int(head.split()[1]))
    writer.close()
    await writer.wait_closed()
    assert found == [200, 400, 200]
