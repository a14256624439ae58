"""A spoken exchange: a question is spoken, heard, thought about with a picture, and answered aloud."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import struct
import time
import zlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.cli.serving import (
    fetch_components,
    local_fleet,
    need_components,
    need_engine,
    need_serving,
    plan_fleet,
)
from atoll.core.errors import AtollError, UsageError
from atoll.core.files import atomic_write

if TYPE_CHECKING:
    from atoll.runtime.local.fleet import LocalFleet

EXAMPLE = "assistant"
QUESTION = "What do you see in the picture?"
_TOKENS = 48
_KILL_AFTER = 3
_SIDE_PX = 224
_RATE_HZ = 24_000
_PLAN_S = 600.0


class SpeechDemoError(AtollError):
    """The spoken exchange did not show what it should have."""


@dataclass(slots=True)
class HeardAnswer:
    """What came back: text and sound (16-bit samples), the executors it went over, and when it began."""

    text: str = ""
    sound: bytearray = field(default_factory=bytearray)
    path: str = ""
    first_text_s: float | None = None
    first_sound_s: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds of speech."""
        return len(self.sound) / 2 / _RATE_HZ


def need_speech() -> None:
    """Say what to install where a package of the spoken exchange is missing."""
    need_serving()
    need_engine()
    need_components()


async def show_speech(
    folder: Path,
    say: Callable[[str], None],
    *,
    question: str = QUESTION,
    picture: Path | None = None,
    out: Path = Path("answer.wav"),
    first: int = 1,
) -> None:
    """Plan an assistant of small parts, bring it up, ask it aloud, kill an executor, and compare.

    `first` is the number of the first step that is told. The answer is written to `out`.
    """
    from atoll.api.fleet import Fleet
    from atoll.runtime.local.build import LocalOptions
    from atoll.runtime.task_fleet.deployment import deployment_of
    from atoll.runtime.task_fleet.parts import own_parts

    image = _read_picture(picture)
    path = folder / f"{EXAMPLE}.yaml"
    fleet = Fleet.load(path)
    (service,) = fleet.problem.services
    say(f"\n{first}. Speech and pictures: a plan for an assistant of small parts ({path.name})")
    plan = await asyncio.to_thread(plan_fleet, fleet, path, _PLAN_S)
    for instance in plan.instances:
        say(f"   {instance.id}: {instance.describe()}")
    tasks = deployment_of(plan, [service.name], {service.name: own_parts()})
    await asyncio.to_thread(fetch_components, tasks)
    say(f"\n{first + 1}. Serve: every executor a process, a front that runs the task, a gateway")
    with local_fleet(
        plan,
        {},
        LocalOptions(),
        host="127.0.0.1",
        port=0,
        log=None,
        on_progress=lambda _name, _state, _reason: None,
        tasks=tasks,
    ) as running:
        await running.start()
        try:
            await _exchange(running, service.name, question, image, out, say, first + 2)
        finally:
            await running.stop(5.0)


async def _exchange(
    fleet: LocalFleet,
    model: str,
    question: str,
    image: bytes,
    out: Path,
    say: Callable[[str], None],
    step: int,
) -> None:
    endpoint = fleet.endpoints[0].endpoint
    for process, *_ in endpoint.held:
        say(f"   process {fleet.agent.processes[process].pid}: {process}")
    say(f"   {fleet.url}/v1 answers")
    say(f'\n{step}. Speak the question: "{question}" (POST /v1/audio/speech)')
    spoken = await _speak(fleet.url, model, question)
    asked = out.with_name(f"{out.stem}-question.wav")
    atomic_write(asked, spoken)
    heard = await _transcribe(fleet.url, model, spoken)
    say(f'   {len(spoken) / 2 / _RATE_HZ:.1f} s of sound in {asked}; the ears hear: "{heard}"')
    say(f"\n{step + 1}. Ask aloud, with a picture; the answer is written and spoken as it comes")
    answer = await _ask(fleet.url, model, spoken, image)
    say(f"   {answer.text}")
    atomic_write(out, _wav(bytes(answer.sound)))
    say(
        f"   first text after {answer.first_text_s or 0:.2f} s, first sound after "
        f"{answer.first_sound_s or 0:.2f} s; {answer.seconds:.1f} s of speech in {out}"
    )
    say(f"   went over {answer.path}")
    if not answer.text or not answer.sound:
        raise SpeechDemoError("the answer has no text or no sound")
    say(f"\n{step + 2}. Ask again, and kill an executor in the middle of the answer (SIGKILL)")
    victim = _choose_victim(answer.path)
    again = await _ask(
        fleet.url, model, spoken, image, lambda: _kill(fleet, victim, say), _KILL_AFTER
    )
    if (again.text, again.sound) != (answer.text, answer.sound):
        raise SpeechDemoError("the answer differs from the undisturbed one")
    say("   The answer went on: letter by letter and sample by sample the same as undisturbed.")
    await fleet.agent.ready([victim])
    say(f"   {victim} runs again, as process {fleet.agent.processes[victim].pid}.")


def _kill(fleet: LocalFleet, victim: str, say: Callable[[str], None]) -> None:
    pid = fleet.agent.processes[victim].pid
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    say(f"   >>> killed process {pid} ({victim}) <<<")


def _choose_victim(path: str) -> str:
    """Return the executor that thinks: its loss in the middle of an answer hurts most."""
    ways = dict(pair.split("=", 1) for pair in path.split(";") if "=" in pair)
    for part in ("llm", *ways):
        if part in ways:
            return ways[part].split(",")[0]
    raise SpeechDemoError(f"the answer does not say which way it went: {path!r}")


async def _speak(url: str, model: str, text: str) -> bytes:
    from atoll.runtime.http.client import request

    order = {"model": model, "input": text, "voice": "heart", "response_format": "wav"}
    answer = await request(f"{url}/v1/audio/speech", body=order, timeout_s=120.0)
    _check(answer.status, answer.body)
    return answer.body


async def _transcribe(url: str, model: str, sound: bytes) -> str:
    from atoll.runtime.http.client import request

    boundary = "atoll-demo-boundary"
    head = (
        f'--{boundary}\r\ncontent-disposition: form-data; name="model"\r\n\r\n{model}\r\n'
        f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="question.wav"\r\n'
        "content-type: audio/wav\r\n\r\n"
    )
    form = head.encode() + sound + f"\r\n--{boundary}--\r\n".encode()
    answer = await request(
        f"{url}/v1/audio/transcriptions",
        method="POST",
        data=form,
        headers={"content-type": f"multipart/form-data; boundary={boundary}"},
        timeout_s=120.0,
    )
    _check(answer.status, answer.body)
    return str(json.loads(answer.body)["text"])


def _check(status: int, body: bytes) -> None:
    if status != 200:
        raise SpeechDemoError(f"status {status}: {body[:200].decode('utf-8', 'replace')}")


async def _ask(
    url: str,
    model: str,
    sound: bytes,
    image: bytes,
    interrupt: Callable[[], None] | None = None,
    after: int = 0,
) -> HeardAnswer:
    """Ask with sound and picture; `interrupt` is called when so many pieces of the answer are there."""
    answer, pieces = HeardAnswer(), 0
    begun_s = time.monotonic()
    async with contextlib.aclosing(_events(url, _chat(model, sound, image), answer)) as events:
        async for delta in events:
            if text := delta.get("content"):
                answer.first_text_s = answer.first_text_s or time.monotonic() - begun_s
                answer.text += text
                pieces += 1
                if pieces == after and interrupt is not None:
                    interrupt()
            if data := (delta.get("audio") or {}).get("data"):
                answer.first_sound_s = answer.first_sound_s or time.monotonic() - begun_s
                answer.sound += base64.b64decode(data)
    if interrupt is not None and pieces < after:
        raise SpeechDemoError("the answer was too short to kill anything")
    return answer


def _chat(model: str, sound: bytes, image: bytes) -> dict[str, Any]:
    content = [
        {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{base64.b64encode(image).decode()}"},
        },
        {
            "type": "input_audio",
            "input_audio": {"data": base64.b64encode(sound).decode(), "format": "wav"},
        },
    ]
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "heart", "format": "pcm16"},
        "max_tokens": _TOKENS,
        "temperature": 0,
        "stream": True,
    }


async def _events(
    url: str, chat: dict[str, Any], answer: HeardAnswer
) -> AsyncGenerator[dict[str, Any], None]:
    from atoll.runtime.http.client import stream_lines

    def note_headers(headers: dict[str, str]) -> None:
        answer.path = headers.get("x-atoll-path", "")

    lines = stream_lines(
        f"{url}/v1/chat/completions", body=chat, timeout_s=120.0, on_headers=note_headers
    )
    async with contextlib.aclosing(lines):
        async for line in lines:
            text = line.decode().strip()
            if text == "data: [DONE]":
                return
            if text.startswith("data: "):
                event = json.loads(text.removeprefix("data: "))
                if "error" in event:
                    raise SpeechDemoError(f"the stream broke: {event['error']['message']}")
                for choice in event["choices"]:
                    yield choice["delta"]
    raise SpeechDemoError("the stream ended early")


def _read_picture(path: Path | None) -> bytes:
    """The picture to ask about: a file, or one that is drawn here."""
    if path is None:
        return draw_circle()
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {(error.strerror or 'no file').lower()}", field="--picture"
        ) from error


def draw_circle(colour: tuple[int, int, int] = (220, 30, 30)) -> bytes:
    """Return a PNG of a circle on white, made with what Python has."""
    centre, radius = (_SIDE_PX - 1) / 2.0, _SIDE_PX * 0.3
    rows = bytearray()
    for y in range(_SIDE_PX):
        rows.append(0)  # no filter
        half = max(0.0, radius**2 - (y - centre) ** 2) ** 0.5
        for x in range(_SIDE_PX):
            rows += bytes(colour if abs(x - centre) <= half and half else (255, 255, 255))
    header = struct.pack(">IIBBBBB", _SIDE_PX, _SIDE_PX, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(rows))), (b"IEND", b""))
    packed = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + packed


def _wav(samples: bytes) -> bytes:
    """The 16-bit mono samples as a WAV file."""
    header = struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", 36 + len(samples), b"WAVE", b"fmt ", 16, 1, 1, _RATE_HZ, 2 * _RATE_HZ, 2, 16),
        *(b"data", len(samples)),
    )
    return header + samples
