"""A vLLM server of one's own, or one that runs on this machine: started, awaited, ended.

It is given prompts as vectors, which it reads with `torch.load` of weights alone: whoever may ask it may keep
it busy with damaged ones. So it listens on loopback, with a key that nobody else knows, and servers of others
are asked on loopback only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from atoll.core.errors import UsageError
from atoll.core.paths import runtime_dir
from atoll.engine.engine_errors import EngineError
from atoll.engines.engine import EngineLayout, ServedModel, ServerHost
from atoll.engines.limits import EngineLaunch
from atoll.engines.vllm import ENGINE as VLLM
from atoll.runtime.endpoints.devices import VISIBLE
from atoll.runtime.http.http_client import FetchError, fetch
from atoll.runtime.http.listen_address import free_ports
from atoll.runtime.supervise.supervised_process import Command, ProcessHandle, last_lines

MODEL = "llm"
"""How a server of one's own calls its model."""
_KEY = "VLLM_API_KEY"
_LOOK_S = 0.5
_STOP_S = 20.0
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class ServerOrder:
    """How a server is started: weights, GPUs (none: on cores), its limits, and the program.

    `language_only` leaves out of a model what is not its llm.
    """

    folder: Path
    launch: EngineLaunch
    dtype: str | None = None
    program: str = "vllm"
    gpus: tuple[str, ...] = ()
    threads: int = 1
    language_only: bool = False
    log: Path | None = None

    def command(self, port: int) -> Command:
        """Return the command of a server at a port of loopback."""
        program = shutil.which(self.program)
        if program is None:
            raise UsageError(
                f"there is no program {self.program!r}",
                field="vllm-chat",
                hint="pip install vllm, or name it as program",
            )
        on_cores = not self.gpus
        launch = self.launch.model_copy(update={"kv_bytes": None}) if on_cores else self.launch
        tp = max(1, len(self.gpus))
        layout = EngineLayout("vllm-chat", nodes=1, tp=tp, copies=1, layers=(1,))
        served = ServedModel(str(self.folder), (MODEL,), launch)
        words = VLLM.command(layout, served, ServerHost(str(port), sys.executable)).arguments
        arguments = [
            *(program, *words[1:], "--enable-prompt-embeds"),
            # How tokens are chosen is the request's to say, and grammars are those of Atoll's engine.
            *("--generation-config", "vllm", "--structured-outputs-config.backend", "guidance"),
        ]
        arguments += ["--dtype", self.dtype] if self.dtype else []
        arguments += ["--language-model-only"] if self.language_only else []
        environment = {"VLLM_NO_USAGE_STATS": "1"}
        if on_cores:
            # Compiling for cores takes minutes, and is for a trial not worth them.
            arguments.append("--enforce-eager")
            kv_bytes = self.launch.kv_bytes or _GIB
            environment |= {
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_CPU_KVCACHE_SPACE": str(-(-kv_bytes // _GIB)),
            }
        else:
            environment[VISIBLE] = ",".join(self.gpus)
        log = self.log or runtime_dir() / f"vllm-{os.getpid()}-{port}.log"
        return Command(tuple(arguments), log, environment, threads=self.threads)


def visible_gpus(device: str, count: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return GPUs from the device "cuda:N" on, as a process that is started here has to name them."""
    if device == "cpu":
        return ()
    first = int(device.partition(":")[2] or 0)
    shown = environment.get(VISIBLE)
    if shown is None:
        return tuple(str(number) for number in range(first, first + count))
    names = shown.split(",")[first : first + count]
    if len(names) < count:
        raise UsageError(
            f"{count} GPUs from {device} on are more than are visible here ({shown})",
            field="vllm-chat.tensor_parallel",
        )
    return tuple(names)


def check_loopback(url: object) -> str:
    """Return the address of a server on this machine; another is refused."""
    parts = urlsplit(url) if isinstance(url, str) else None
    host = parts.hostname if parts is not None else None
    if parts is None or parts.scheme != "http" or not host:
        raise UsageError(
            "no url of a server", field="vllm-chat.url", hint="write http://127.0.0.1:PORT"
        )
    try:
        is_near = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        is_near = False
    if not is_near:
        raise UsageError(
            f"{host} is another machine, and prompts of vectors are for loopback alone",
            field="vllm-chat.url",
            hint="run this executor where the server is",
        )
    return re.sub(r"/v1$", "", f"http://{parts.netloc}{parts.path}".rstrip("/"))


@dataclass(slots=True)
class VllmServer:
    """A server: one to start by `order`, or the one at `url`."""

    order: ServerOrder | None = None
    url: str = ""
    api_key: str | None = None
    model: str = MODEL
    max_length: int | None = None
    """Positions of prompt and answer together, as it says."""
    _process: ProcessHandle | None = None
    _ended: asyncio.Task[int] | None = None
    _log: Path | None = field(default=None)

    async def start(self, ready_s: float) -> None:
        """Start it if it is one's own, and return when it serves; EngineError if that does not come."""
        if self.order is not None:
            (port,) = free_ports(1)
            self.api_key = secrets.token_hex(32)
            self.url = f"http://127.0.0.1:{port}"
            command = self.order.command(port)
            # Inherited: what a command has of its own stands among a supervisor's arguments, for all to see.
            os.environ[_KEY] = self.api_key
            command.log.parent.mkdir(parents=True, exist_ok=True)
            self._log = command.log
            self._process = await ProcessHandle.start(command)
            self._ended = asyncio.create_task(self._process.wait())
        try:
            async with asyncio.timeout(ready_s):
                while not await self._is_ready():
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            raise EngineError(f"vLLM was not ready within {ready_s:g} s{self._words()}") from error

    async def _is_ready(self) -> bool:
        if self.has_ended:
            raise EngineError(f"vLLM ended before it was ready{self._words()}")
        try:
            status, body = await fetch(f"{self.url}/v1/models", api_key=self.api_key)
        except FetchError:
            return False
        if status != 200:
            # It is there, and something is wrong with what it was asked.
            raise EngineError(f"{self.url} answers /v1/models with status {status}")
        try:
            found = msgspec.json.decode(body)["data"][0]
            self.model, length = str(found["id"]), found.get("max_model_len")
        except (msgspec.DecodeError, LookupError, TypeError, AttributeError) as error:
            raise EngineError(f"{self.url} names no model at /v1/models") from error
        self.max_length = length if isinstance(length, int) else None
        return True

    @property
    def has_ended(self) -> bool:
        """Whether a server of one's own is no more."""
        return self._ended is not None and self._ended.done()

    def _words(self) -> str:
        said = last_lines(self._log, 3) if self._log is not None else ()
        return f": {' | '.join(said)}" if said else ""

    async def close(self) -> None:
        """End a server of one's own, which no more requests reach."""
        if self._process is None or self._ended is None:
            return
        self._process.term()
        done, _ = await asyncio.wait({self._ended}, timeout=_STOP_S)
        if not done:
            self._process.kill()
            await self._ended
        self._process = None
        if self._log is not None and self.order is not None and self.order.log is None:
            with contextlib.suppress(OSError):
                self._log.unlink()
