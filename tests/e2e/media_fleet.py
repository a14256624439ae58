"""A fleet of real small components as a process, and what hostile clients send it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import AtollError
from tests.runtime.media.samples import chunk, png, wav

ROOT = Path(__file__).resolve().parents[2]
MODEL = "assistant"
CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
IMAGES, EMBEDDINGS = "/v1/images/generations", "/v1/embeddings"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
Json = dict[str, Any]


@dataclass
class MediaFleet:
    """`atoll tasks serve`: where it answers, where its graph server does, and its processes."""

    url: str
    graph_server: str
    pid: int
    folder: Path

    def memory(self) -> dict[int, int]:
        """Return bytes of memory by process, of those that take in what clients send and work on it."""
        from atoll.runtime.supervise.supervisor import descendants

        found = {}
        for pid in (self.pid, *descendants(self.pid)):
            with contextlib.suppress(OSError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                found[pid] = pages * os.sysconf("SC_PAGE_SIZE")
        return found


def need_weights() -> None:
    """Skip the test where packages or weights cannot be had."""
    for package in ("torch", "transformers", "onnxruntime", "hibari", "PIL"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is missing: needs the extras 'engine' and 'components'")
    from atoll.components.component_registry import COMPONENTS
    from atoll.components.component_weights import prefetch
    from atoll.engine.weights.sources import DEFAULT_MODEL, resolve

    try:
        resolve(DEFAULT_MODEL)
        prefetch([name for name in COMPONENTS if name not in ("pp-ocr", "efficientnet-lite0")])
    except AtollError as error:
        pytest.skip(f"the weights cannot be fetched: {error}")


@contextlib.contextmanager
def media_fleet() -> Iterator[MediaFleet]:
    """Serve the example of a tasks file; afterwards nothing of it may be left."""
    # Sockets need short paths.
    with tempfile.TemporaryDirectory(prefix="a") as folder:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "atoll", "tasks", "serve", "examples/tasks/assistant.yaml"),
                *("--json", "--port", "0", "--drain", "2s"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | {"XDG_RUNTIME_DIR": folder},
            text=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        with process.stdout, process.stderr:
            try:
                line = process.stdout.readline()
                assert line, process.stderr.read()
                state = json.loads(line)
                (endpoint,) = state["endpoints"]
                run = Path(state["folder"])
                yield MediaFleet(state["url"], endpoint["url"], process.pid, run)
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(60)
        assert process.returncode == 0
        assert not list(Path(folder).rglob("run-*"))
        assert not Path(f"/dev/shm/atoll-{run.name}").exists()


@dataclass(frozen=True)
class BadRequest:
    """A request that must be refused: a JSON body, or a form where it has a file."""

    name: str
    path: str
    body: Json
    param: str
    code: str | None = None
    status: tuple[int, ...] = (400,)
    file: bytes | None = None
    more: Json = field(default_factory=dict)


def bad_requests(picture: bytes) -> list[BadRequest]:
    """Return everything that a hostile client may think of."""
    tone = bytes(range(256)) * 125  # a second of 16-bit noise
    header = wav(tone)
    long = 16_000 * 2 * 36_000
    heard = [
        ("a broken header", header[:30], "invalid_media"),
        ("no WAV at all", b"RIFF" + os.urandom(100), "invalid_media"),
        ("ten hours, as it claims", wav(tone, claimed=long), None),
        ("nothing", b"", None),
        ("no samples", wav(b""), "invalid_media"),
        ("a rate of 0", wav(tone, rate_hz=0), "unsupported_media"),
        ("a rate of 1 Hz", wav(tone, rate_hz=1), "unsupported_media"),
        ("a rate of 2 GHz", wav(tone, rate_hz=2_000_000_000), "unsupported_media"),
        ("a thousand channels", wav(tone, channels=1000), "invalid_media"),
        ("700 s of 8 kHz", wav(bytes(8_000 * 700), rate_hz=8_000, bits=8), "media_too_large"),
        ("NaN as samples", wav(b"\xff\xff\xff\x7f" * 1000, form=3, bits=32), "invalid_media"),
        ("a picture", picture, "unsupported_media"),
        ("text", b"hello " * 100, "invalid_media"),
    ]
    bad = [
        BadRequest(f"hear {name}", TRANSCRIPTIONS, {}, "file", code, (400, 413), file=data)
        for name, data, code in heard
    ]
    sound = "messages[0].content[0].input_audio"
    bad += [
        BadRequest(f"chat with {name}", CHAT, _with(_sound(data)), sound, code, (400, 413))
        for name, data, code in heard
    ]
    image = "messages[0].content[0].image_url"
    bomb = zlib.compress(bytes(40_000_000), 9)
    comment = chunk(b"zTXt", b"Comment\0\0" + bomb)
    seen = [
        ("60000x60000", _data(png(60_000, 60_000, bomb)), "media_too_large"),
        ("no pixels", _data(png(0, 0, b"")), "invalid_media"),
        ("pixels missing", _data(picture[:200]), "invalid_media"),
        ("a video named so", _data(b"\0\0\0\x18ftypmp42" + bytes(200)), "unsupported_media"),
        ("a sound named so", _data(header), "unsupported_media"),
        ("a remote URL", "https://example.com/cat.png", None),
        ("an address of the machine", "http://127.0.0.1:1/cat.png", None),
        ("a file", "file:///etc/passwd", None),
        ("a javascript", "javascript:alert(1)", None),
        ("not base64", "data:image/png;base64,!!!!", None),
        ("nothing", "", None),
        ("an empty data URL", "data:image/png;base64,", None),
        ("too much base64", "data:image/png;base64," + "A" * (29 * 2**20), "media_too_large"),
    ]
    bad += [
        BadRequest(f"see {name}", CHAT, _with(_picture(url)), image, code, (400, 413))
        for name, url, code in seen
    ]
    video = {"type": "video_url", "video_url": {"url": "data:video/gif;base64,"}}
    noise = {"type": "video_url", "video_url": {"url": _data(b"GIF89a" + bytes(50), "video/gif")}}
    place = "messages[0].content[0].video_url"
    bad += [
        BadRequest("see an empty video", CHAT, _with(video), place),
        BadRequest("see a video without frames", CHAT, _with(noise), place),
        BadRequest("a thousand pictures", CHAT, _with(*[_picture(_data(picture))] * 1000), ""),
        BadRequest("unknown voice", SPEECH, {"input": "Hi.", "voice": "\u2728nobody"}, "voice"),
        BadRequest("speak nothing", SPEECH, {"input": "  ", "voice": "heart"}, "input"),
        BadRequest("speak a book", SPEECH, {"input": "a " * 4096, "voice": "heart"}, "input"),
        BadRequest("speed", SPEECH, {"input": "a", "voice": "heart", "speed": 1e9}, "speed"),
        BadRequest("unknown voice of a chat", CHAT, _spoken("nobody"), "audio.voice"),
        BadRequest("a million pictures", IMAGES, {"prompt": "x", "n": 10**6}, "n"),
        BadRequest("a huge picture", IMAGES, {"prompt": "x", "size": "99999x99999"}, "size"),
        BadRequest("a text of nothing", EMBEDDINGS, {"input": ""}, "input"),
        BadRequest("a stream of vectors", EMBEDDINGS, {"input": "a", "stream": True}, "stream"),
        BadRequest("no messages", CHAT, {"messages": []}, "messages"),
        BadRequest("no content", CHAT, {"messages": [{"role": "user", "content": []}]}, ""),
        BadRequest("nine answers", CHAT, {**_with("Hi"), "n": 9}, "n"),
        BadRequest("a deep tool", CHAT, {**_with("Hi"), "tools": [_deep(600)]}, "tools"),
        BadRequest(
            "calls of none", CHAT, {**_with("Hi"), "tool_choice": "required"}, "tool_choice"
        ),
        BadRequest("heat as text", CHAT, {**_with("Hi"), "temperature": "hot"}, "temperature"),
    ]
    # A comment is none of our business, however large it is once unpacked: it must only cost nothing.
    good = _with(_picture(_data(png(8, 8, zlib.compress(bytes(72)), comment))))
    return [*bad, BadRequest("a comment that is a bomb", CHAT, good, "", None, (200, 400, 413))]


def _with(*parts: Json | str) -> Json:
    content: Any = parts[0] if isinstance(parts[0], str) else list(parts)
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


def _deep(levels: int) -> Json:
    deep: Json = {}
    for _ in range(levels):
        deep = {"function": deep}
    return deep


def _sound(data: bytes) -> Json:
    text = base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}}


def _picture(url: str) -> Json:
    return {"type": "image_url", "image_url": {"url": url}}


def _data(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _spoken(voice: str) -> Json:
    audio = {"voice": voice, "format": "wav"}
    return {**_with("Hi"), "modalities": ["text", "audio"], "audio": audio}
