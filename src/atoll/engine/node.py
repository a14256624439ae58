"""A node process: `python -m atoll.engine.node --config FILE` holds one layer range and serves it.

It stops on SIGTERM once nothing runs any more, at once on a second one or on SIGINT, and with the
process that started it. Any error it does not expect ends it: whoever supervises it starts it
again, and schedulers carry on elsewhere in the meantime.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from atoll.core.errors import AtollError, MissingDependencyError
from atoll.core.files import atomic_write, read_text_limited
from atoll.core.frozen import Frozen
from atoll.engine.batcher import MaxInFlight
from atoll.engine.engine_messages import Heartbeat, Message, NodeStats, SchedulerHello, Stop
from atoll.engine.frames import encode
from atoll.engine.mailbox import ZmqMailbox, dealer, import_zmq
from atoll.engines.stage import StepLimits, limit_steps

if TYPE_CHECKING:
    from atoll.engine.model_stage import StageModel
    from atoll.engine.rank_group import RankGroup
    from atoll.engine.ranked_stage import RankedStage

_LOG = logging.getLogger("atoll.engine.node")
# How long messages are waited for: with nothing to run, and while decodes wait for a group that is out.
_IDLE_POLL_S = 0.25
_HELD_POLL_S = 0.005
# How long a node on a GPU looks for messages of the other stages before it sleeps, and how many cores must be
# there for it: on an H200 in two stages that takes 5 % off the time per token.
_BUSY_S, _BUSY_CORES = 0.02, 4
# How often old sequences are purged and the figures of the heartbeat renewed.
_LOOK_S = 0.1
# A scheduler that has not said hello for so long hears nothing more.
_FORGET_SCHEDULER_S = 30.0
_PR_SET_PDEATHSIG = 1
_READY = "ready:"
_PROGRESS = re.compile(rf"{_READY}|(?:loading weights|warming): \d+ of \d+ .*")


class NodeConfig(Frozen):
    """Settings of a node: its layers and how it holds them.

    model: see `atoll.engine.weights.sources`. quantization: the format that matrices in 16 bits are turned
    into as they are loaded (none: as they are stored). kv_dtype: the format of the
    KV cache (none: dtype). bind: the inbox; a port of `*` takes a free one.
    ready_file: written once the node can serve (a `NodeReady`). tp: processes that split every layer, each on
    a GPU of its own (those from `device` on) or on the cores. threads and cpus: how many threads a step may
    use, all processes together, and which cores (none: any). kv_blocks or kv_bytes: room for KV, of all
    processes together (neither: 512 MiB on a CPU, most of what is left on a GPU). token_budget: rows in a
    batch; chunk: rows of one prompt in a batch; max_sequences: sequences in a batch, and on one node alone
    also those that run (none: as the engine has them on this device, `limit_steps`); promised_ttft_s: the
    time to the first token by which prompts are ordered (none: by arrival); max_in_flight: decode groups
    under way at a time, as measured step times say (auto), any number (free or 0), or so many. scheduling:
    whether the next step is prepared while the device works (async) or after it (none: async on a GPU, sync
    on cores). drain_s: how long a stopping node waits for what still runs.
    """

    name: str
    model: str
    start: int = Field(ge=0)
    end: int = Field(ge=1)
    bind: str = "tcp://127.0.0.1:*"
    ready_file: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    quantization: Literal["fp8"] | None = None
    kv_dtype: Literal["fp8"] | None = None
    device: str = "cpu"
    tp: int = Field(default=1, ge=1)
    threads: int = Field(default=1, ge=1)
    cpus: tuple[int, ...] = ()
    kv_blocks: int | None = Field(default=None, ge=1)
    kv_bytes: int | None = Field(default=None, ge=1)
    block_size: int = Field(default=16, ge=1)
    token_budget: int | None = Field(default=None, ge=1)
    chunk: int | None = Field(default=None, ge=1)
    max_sequences: int | None = Field(default=None, ge=1)
    max_in_flight: MaxInFlight = "auto"
    promised_ttft_s: float | None = Field(default=None, gt=0.0)
    scheduling: Literal["sync", "async"] | None = None
    prefix_caching: bool = True
    heartbeat_s: float = Field(default=0.25, gt=0.0)
    orphan_s: float = Field(default=300.0, gt=0.0)
    drain_s: float = Field(default=30.0, ge=0.0)
    die_with_parent: bool = True
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    @property
    def steps(self) -> StepLimits:
        """The limits of a step."""
        own = limit_steps(self.device, self.token_budget, self.max_sequences)
        return own if self.chunk is None else own._replace(chunk=self.chunk)


class NodeReady(Frozen):
    """Report of a node once it can serve; `rank_pids` are its processes beside `pid`."""

    name: str
    endpoint: str
    pid: int
    start: int
    end: int
    layers: int
    blocks: int
    block_size: int
    rank_pids: tuple[int, ...] = ()


class HeartbeatThread(threading.Thread):
    """Tells schedulers that the node lives, also while a long step runs."""

    def __init__(self, every_s: float, stats: NodeStats, context: Any = None) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._every_s = every_s
        self._context = context
        self.stats = stats
        self._hello_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopped = False

    def hello(self, endpoint: str) -> None:
        """Note that a scheduler wants to hear from us; a new one hears at once."""
        with self._lock:
            is_new = endpoint not in self._hello_s
            self._hello_s[endpoint] = time.monotonic()
        if is_new:
            self._wake.set()

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._wake.set()
        self.join(timeout=2.0)

    def run(self) -> None:
        """Beat until stopped."""
        zmq = import_zmq()
        context = self._context or zmq.Context()
        sockets: dict[str, Any] = {}
        while not self._stopped:
            self._wake.wait(self._every_s)
            self._wake.clear()
            parts = encode(Heartbeat(stats=self.stats))
            for endpoint in self._live_schedulers():
                if endpoint not in sockets:
                    sockets[endpoint] = dealer(context, endpoint)
                # A full queue loses this beat; the next one says as much.
                with contextlib.suppress(zmq.Again):
                    sockets[endpoint].send_multipart(parts, zmq.NOBLOCK)
        for socket in sockets.values():
            socket.close(0)
        if self._context is None:
            context.term()

    def _live_schedulers(self) -> list[str]:
        limit_s = time.monotonic() - _FORGET_SCHEDULER_S
        with self._lock:
            self._hello_s = {e: at_s for e, at_s in self._hello_s.items() if at_s > limit_s}
            return list(self._hello_s)


class NodeProcess:
    """The loop of a node: messages in, a step, messages out.

    It may run in a thread of a larger process (`atoll.engine.local_pipeline`); with that process's ZeroMQ
    `context` endpoints may be `inproc://`.
    """

    def __init__(self, config: NodeConfig, context: Any = None) -> None:
        from atoll.engine.batch_pacing import place_key
        from atoll.engine.guidance import MatcherFactory
        from atoll.engine.kv import BlockPool
        from atoll.engine.node_core import CoreSettings, NodeCore
        from atoll.engine.text import TextCodec
        from atoll.engine.weights.sources import resolve

        self.config = config
        folder = resolve(config.model)
        self._leave: list[Callable[[], None]] = []
        self._rank_pids: tuple[int, ...] = ()
        stage = load_stage(config, folder) if config.tp == 1 else self._lead(folder)
        # Before it says that it is ready: what a step compiles, requests wait for.
        steps = config.steps
        stage.warm(steps.tokens, steps.sequences, _teller("warming"))
        matchers = None
        # Only the last stage chooses tokens, so it alone needs to know what guides allow.
        if config.end == stage.total and (folder / "tokenizer.json").is_file():
            matchers = MatcherFactory(folder, stage.vocabulary, TextCodec(folder).eos)
        self.mailbox = ZmqMailbox(config.bind, context)
        self.core = NodeCore(
            config.name,
            self.mailbox.endpoint,
            stage,
            BlockPool(stage.cache.blocks, config.block_size, prefix_caching=config.prefix_caching),
            self.mailbox.send,
            time.monotonic,
            settings=CoreSettings(
                token_budget=steps.tokens,
                chunk=steps.chunk,
                max_sequences=steps.sequences,
                promised_ttft_s=config.promised_ttft_s,
                max_in_flight=config.max_in_flight,
                orphan_s=config.orphan_s,
                place=place_key(config.device),
                scheduling=config.scheduling or ("sync" if config.device == "cpu" else "async"),
            ),
            matchers=matchers,
            # A new number for each start: by it schedulers know that what ran here before is gone.
            incarnation=secrets.randbits(62),
        )
        self.heartbeat = HeartbeatThread(config.heartbeat_s, self.core.stats(), context)
        self._draining_s: float | None = None
        self._stopping = False
        self.ready = NodeReady(
            name=config.name,
            endpoint=self.mailbox.endpoint,
            pid=os.getpid(),
            start=config.start,
            end=config.end,
            layers=stage.total,
            blocks=stage.cache.blocks,
            block_size=config.block_size,
            rank_pids=self._rank_pids,
        )

    def _lead(self, folder: Path) -> RankedStage:
        """Start the other ranks, and return the stage that all of them compute together."""
        from atoll.engine.model_stage import load_config
        from atoll.engine.rank_crew import RankCrew
        from atoll.engine.rank_cut import RankCut
        from atoll.engine.rank_group import ProcessRanks, rank_device
        from atoll.engine.ranked_stage import RankedStage

        config = self.config
        # Before any process is started: what cannot be split is said once.
        RankCut(load_config(folder), 0, config.tp)
        crew = RankCrew(config.tp, config.to_json())
        ranks = ProcessRanks(0, config.tp, rank_device(config.device, 0), crew.store)
        self._leave, self._rank_pids = [crew.close, ranks.close], crew.pids
        return RankedStage(load_stage(config, folder, ranks), ranks, crew.tell)

    def stop(self, *, at_once: bool = False) -> None:
        """Leave the loop when nothing runs any more, or after the current step."""
        # Told a second time, it does not wait for what still runs.
        self._stopping = self._stopping or at_once or self._draining_s is not None
        self._draining_s = time.monotonic()

    @property
    def _done(self) -> bool:
        if self._stopping or self._draining_s is None:
            return self._stopping
        return self.core.idle or time.monotonic() - self._draining_s > self.config.drain_s

    def run(self) -> None:
        """Serve until told to stop."""
        self.heartbeat.start()
        # The file comes last: whoever waits for it may ask at once.
        if self.config.ready_file is not None:
            atomic_write(self.config.ready_file, self.ready.to_json())
        _LOG.info(
            f"{_READY} layers [%d, %d) at %s, %d KV blocks",
            *(self.ready.start, self.ready.end, self.ready.endpoint, self.ready.blocks),
        )
        worked, looked_s = False, time.monotonic()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        on_gpu = self.config.device != "cpu" and (cores or 1) >= _BUSY_CORES
        try:
            while not self._done:
                wait_s = 0.0 if worked else _HELD_POLL_S if self.core.held_back else _IDLE_POLL_S
                busy_s = 0.0 if worked or not on_gpu or self.core.idle else _BUSY_S
                for message in self.mailbox.receive(wait_s, busy_s):
                    self._handle(message)
                worked = self.core.step()
                if time.monotonic() - looked_s > _LOOK_S:
                    for endpoint in self.mailbox.take_broken():
                        self.core.note_broken(endpoint)
                    self.core.purge()
                    self.heartbeat.stats = self.core.stats()
                    looked_s = time.monotonic()
        finally:
            self.heartbeat.stop()
            self.mailbox.close()
            for leave in self._leave:
                leave()

    def _handle(self, message: Message) -> None:
        match message:
            case SchedulerHello(reply_to=endpoint):
                self.heartbeat.hello(endpoint)
                self.mailbox.watch(endpoint)
                self.core.hear_owner(message)
            case Stop(drain=drain):
                self.stop(at_once=not drain)
            case _:
                self.core.handle(message)


def load_stage(config: NodeConfig, folder: Path, ranks: RankGroup | None = None) -> StageModel:
    """Load the layers of a node, or the part of a rank of it."""
    import torch

    from atoll.engine.model_stage import StageModel

    torch.set_num_threads(max(1, config.threads // config.tp))
    device = config.device
    if ranks is not None:
        from atoll.engine.rank_group import rank_device

        device = str(rank_device(device, ranks.rank))
    return StageModel(
        folder,
        config.start,
        config.end,
        blocks=config.kv_blocks,
        kv_bytes=config.kv_bytes,
        block_size=config.block_size,
        device=device,
        dtype=config.dtype,
        quantization=config.quantization,
        kv_dtype=config.kv_dtype,
        progress=_teller("loading weights") if ranks is None or ranks.rank == 0 else None,
        ranks=ranks,
    )


def _teller(what: str) -> Callable[[int, int, str], None]:
    """Return what logs some ten times how far something is."""

    def tell(done: int, total: int, name: str) -> None:
        if done == total or done % max(1, total // 10) == 0:
            _LOG.info("%s: %d of %d (%s)", what, done, total, name)

    return tell


def read_progress(lines: Sequence[str]) -> str:
    """Return how far a node that starts is, by the last lines of its log; "": they do not say."""
    for line in reversed(lines):
        found = _PROGRESS.search(line)
        if found is not None:
            # What a start before this one said is over.
            return "" if found[0] == _READY else found[0]
    return ""


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux; elsewhere nothing)."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have ended before the kernel was asked to watch it.
    if os.getppid() != parent:
        sys.exit("the parent has ended already")


def main(arguments: list[str] | None = None) -> int:
    """Read the configuration, serve, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m atoll.engine.node", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON file of a NodeConfig")
    path: Path = parser.parse_args(arguments).config
    try:
        config = NodeConfig.from_json(read_text_limited(path), path=path)
        logging.basicConfig(
            level=config.log_level, format=f"%(asctime)s %(levelname)s {config.name}: %(message)s"
        )
        if config.die_with_parent:
            die_with_parent()
        if config.cpus:
            os.sched_setaffinity(0, config.cpus)
        process = _start(config)
        signal.signal(signal.SIGTERM, lambda *_: process.stop())
        signal.signal(signal.SIGINT, lambda *_: process.stop(at_once=True))
        process.run()
    except AtollError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def _start(config: NodeConfig) -> NodeProcess:
    try:
        return NodeProcess(config)
    except ModuleNotFoundError as error:
        missing = error.name or "torch"
        raise MissingDependencyError(missing, "engine", needed_for="a node") from error


if __name__ == "__main__":
    sys.exit(main())
