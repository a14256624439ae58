"""Seeded plan changes of a fleet that streams all the time: no client may see any of them.

Real CPU engines of a tiny random model stand on the local target, join a real hub and answer behind a real
gateway. A controller, a process of its own, is told again and again that more or less is asked and that
prices have moved: replicas come and go, layers are cut differently, pipelines of two nodes take the place of
single ones and back, prefill and decode part and come together, on other kinds of machines. Meanwhile
engines, daemons and the controller itself are killed (SIGKILL), commands cannot work, machines are taken by
somebody else. Every answer is compared with the whole model's greedy one.

`below_demand_s` are the seconds in which what was listed as ready carried less than was asked. Plans have one
instance to spare, so that any one may die. A rise is announced `LEAD_S` before it comes, as a forecast would;
it comes sooner where the fleet is ready for it sooner. `below_at_gateway_s` is the same by what the gateway
sends requests to.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import math
import os
import secrets
import signal
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.control.decision.lane_capacity import CarriedLoad, find_mixed
from atoll.control.operation.control_loop import InstanceStore
from atoll.control.operation.fleet_history import History
from atoll.core.files import atomic_write
from atoll.core.ids import Phase
from atoll.core.rng import stream
from atoll.deploy.labels import Labels
from atoll.deploy.local.daemon import STATE, DaemonState
from atoll.deploy.local.local_deployer import LocalDeployer
from atoll.deploy.node_command import NodeCommand
from atoll.deploy.target import InstanceStatus, StartOrder
from atoll.plan.plan import Instance
from atoll.runtime.supervise.fork_client import ForkServer
from benchmarks.report import ROOT, Figure
from tests.slow.answers import BrokenAnswerError, complete
from tests.slow.processes import find_marked
from tests.slow.targets.rollout_changes import (
    MACHINES,
    SERVICE,
    AskedOfFleet,
    PlanChange,
    RolloutTemplate,
    Trouble,
    make_instance,
    seed_changes,
)
from tests.slow.targets.rollout_controller import (
    ASKED,
    FLEET,
    GATEWAY,
    HISTORY,
    INSTANCES,
    TARGET,
    make_target,
)
from tests.slow.verdict import conclude
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    import numpy as np

TAG = "ATOLL_ROLLOUT_RUN"
"""Whatever the check starts, however far down, carries this in its environment."""
LEAD_S = 60.0
CHANGE_S = 300.0
CLIENTS = 3
PROMPTS = 8
MAX_TOKENS = 400
_HUNG_S = 120.0
_LOOK_S = 0.1
_START_S = 60.0
_LAST_S = 15.0
_LAST_TERM = 2**31
_SQUATTER = "squatter"
_SMALL: tuple[Trouble, ...] = (
    "kill-controller",
    "kill-engine",
    "broken-program",
    "kill-daemon",
    "no-room",
)
"""What goes wrong in a small run."""
_SMALL_SEED = 397
"""Its changes start little: loading engines is what takes time."""


@dataclass
class RolloutOutcome:
    """What was seen."""

    changes: int = 0
    errors: int = 0
    truncated: int = 0
    token_mismatch: int = 0
    orphans: int = 0
    below_demand_s: float = 0.0
    below_at_gateway_s: float = 0.0
    requests: int = 0
    tokens: int = 0
    starts: int = 0
    refused: int = 0
    troubles: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def count(self, error: BrokenAnswerError) -> None:
        """Count an answer that is not what it should be."""
        kind = "errors" if error.kind == "hung" else error.kind
        setattr(self, kind, getattr(self, kind) + 1)
        self.notes.append(str(error))


# The answers


def learn_answers(model: Path, count: int) -> list[tuple[str, list[int]]]:
    """Return prompts with the whole model's greedy answers of so many tokens."""
    import torch
    import transformers
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    with contextlib.redirect_stderr(io.StringIO()):
        whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    # Answers are as long as was asked for, whatever the model says.
    whole.generation_config.eos_token_id = None
    # All at once, so all of one length; one after the other takes eight times as long.
    prompts = [f"Prompt number {number * 7919:6d}: " * 2 for number in range(PROMPTS)]
    given = torch.tensor([tokenizer.encode(prompt).ids for prompt in prompts])
    with torch.no_grad():
        answers = whole.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    return list(zip(prompts, answers[:, given.shape[1] :].tolist(), strict=True))


class StreamingClients:
    """Clients that stream greedy answers, one after the other, until told to end."""

    def __init__(
        self, url: str, answers: list[tuple[str, list[int]]], outcome: RolloutOutcome
    ) -> None:
        self._url, self._answers, self._outcome = url, answers, outcome
        self._over = False
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, count: int) -> None:
        """Start so many of them."""
        self._tasks += [asyncio.create_task(self._client(number)) for number in range(count)]

    async def end(self) -> None:
        """Let every client finish its answer."""
        self._over = True
        await asyncio.gather(*self._tasks)

    async def _client(self, number: int) -> None:
        chance = stream(number, "client")
        while not self._over:
            which = int(chance.integers(len(self._answers)))
            most = len(self._answers[which][1])
            await self.ask(which, int(chance.integers(most // 8, most)))
            await asyncio.sleep(float(chance.uniform(0.0, 0.5)))

    async def ask(self, which: int, count: int) -> None:
        """Stream an answer of so many tokens and compare it."""
        prompt, expected = self._answers[which]
        outcome = self._outcome
        outcome.requests += 1
        body = {"model": SERVICE, "prompt": prompt, "max_tokens": count, "temperature": 0}
        try:
            reader = await complete(self._url, body | {"ignore_eos": True}, _HUNG_S)
            outcome.tokens += reader.tokens
            reader.check_end(count)
            if reader.token_ids != expected[:count]:
                raise BrokenAnswerError("token_mismatch", f"prompt {which} differs")
        except BrokenAnswerError as error:
            outcome.count(error)


# The processes


class RolloutSite:
    """A hub, a gateway, the target, and the controller that may be killed, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = self._admin = ""
        self.tag = secrets.token_hex(8)
        self._environment = dict(os.environ) | {
            TAG: self.tag,
            "ATOLL_STATE": str(folder / "state"),
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "PYTHONPATH": str(ROOT),
        }
        self._environment.pop("ATOLL_FABRIC", None)
        self._fork_server: ForkServer | None = None
        self._hub: Process | None = None
        self._gateway: Process | None = None
        self.controller: Process | None = None
        self._controllers = 0

    async def open(self, model: Path) -> None:
        """Start hub and gateway, and what engines are forked from: loading torch takes them seconds."""
        from atoll.deploy.commands.stage_node import FORK_SERVER_VARIABLE
        from atoll.runtime.http.listen_address import free_ports

        (self.folder / "run").mkdir(mode=0o700)
        socket = self.folder / "fork_server"
        self._environment[FORK_SERVER_VARIABLE] = str(socket)
        loading = asyncio.create_task(ForkServer.share([str(model)], str(socket)))
        (port,) = free_ports(1)
        token = self.folder / "fabric.token"
        token.touch(mode=0o600)
        token.write_text(f"open://127.0.0.1:{port}")
        self._hub = await self._start(
            "hub", "-m", "atoll", "hub", "--open", "--listen", f"127.0.0.1:{port}"
        )
        await _said(self._hub, "listens at")
        self._gateway = await self._start(
            "gateway", "-m", "atoll", "gateway", "--fabric", f"@{token}", "--open", "--port", "0",
            "--json", "--log", str(self.folder / "gateway.jsonl"),
        )  # fmt: skip
        said = await _said(self._gateway, '"url"')
        (self.folder / GATEWAY).write_text(said)
        self.url, self._admin = (json.loads(said)[name] for name in ("url", "admin_socket"))
        self._fork_server = await loading

    async def _start(self, name: str, *arguments: str) -> Process:
        with (self.folder / f"{name}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                *arguments,
                cwd=self.folder,
                stdin=DEVNULL,
                stdout=log if name == "controller" else PIPE,
                stderr=log,
                env=self._environment,
            )

    async def start_controller(self) -> None:
        """Start a controller that knows nothing of the one before."""
        self._controllers += 1
        self.controller = await self._start(
            "controller", "-m", "benchmarks.rollout_controller", str(self.folder),
            f"controller-{self._controllers}",
        )  # fmt: skip

    async def list_usable(self) -> set[str]:
        """Return the instances that the gateway sends requests to."""
        from atoll.runtime.http.http_client import fetch

        _, body = await fetch("http://gateway/atoll/v1/status", unix_socket=self._admin)
        return {
            backend["metadata"]["node"]
            for backend in json.loads(body)["backends"]
            if backend["state"] == "up"
        }

    async def kill_controller(self) -> None:
        """Kill the controller in the middle of whatever it does."""
        if self.controller is not None:
            with contextlib.suppress(ProcessLookupError):
                self.controller.kill()
            await self.controller.wait()
            self.controller = None

    async def close(self, target: LocalDeployer) -> None:
        """End everything: the controller, what stands, the gateway, the hub."""
        await self.kill_controller()
        for fleet in (FLEET, _SQUATTER):
            for status in target.list(fleet):
                await asyncio.to_thread(target.stop, status.handle, _LAST_TERM)
        if self._fork_server is not None:
            await self._fork_server.close()
        for process in (self._gateway, self._hub):
            if process is None:
                continue
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _START_S)
            except TimeoutError:
                process.kill()
                await process.wait()

    def find_logging(self, log: str) -> int | None:
        """Return the engine process whose supervisor writes a log of this name; forks share a command."""
        from atoll.runtime.supervise.supervisor import descendants

        for pid in find_marked(TAG, self.tag):
            with contextlib.suppress(OSError):
                for link in Path(f"/proc/{pid}/fd").iterdir():
                    if os.readlink(link).endswith(log):
                        return next(iter(descendants(pid)), None)
        return None

    def orphans(self) -> list[int]:
        """Return the processes of this run that still live."""
        return [pid for pid in find_marked(TAG, self.tag) if pid != os.getpid()]


async def _said(process: Process, what: str) -> str:
    """Return the line in which a process says something; it has a minute for it."""
    assert process.stdout is not None
    async with asyncio.timeout(_START_S):
        while line := (await process.stdout.readline()).decode():
            if what in line:
                return line
    raise RuntimeError(f"a process ended before it said {what!r}")


# The run


class Rollout:
    """A fleet, what is asked of it, and what befalls it."""

    def __init__(
        self, site: RolloutSite, first: AskedOfFleet, seed: int, lead_s: float, change_s: float
    ) -> None:
        self.site = site
        self._lead_s, self._change_s = lead_s, change_s
        self.outcome = RolloutOutcome()
        self.asked = first
        self.target = make_target(site.folder, first)
        self._store = InstanceStore(site.folder / INSTANCES)
        self._known: dict[str, Instance] = {}
        self._failed: set[str] = set()
        self._statuses: tuple[InstanceStatus, ...] = ()
        self._chance: np.random.Generator = stream(seed, "blows")
        self._demand_per_s = 0.0
        self._rising: tuple[AskedOfFleet, float] | None = None
        self._looked_s: float | None = None

    async def bring_up(self) -> None:
        """Start the first plan."""
        self.ask(self.asked)
        await self.site.start_controller()
        await self._until(self._is_complete, "the first plan")
        self._demand_per_s = self.asked.rate_per_s
        self._looked_s = time.monotonic()

    def ask(self, asked: AskedOfFleet) -> None:
        """Tell the controller what is asked from now on."""
        self.asked = asked
        atomic_write(self.site.folder / ASKED, asked.to_json() + "\n")

    async def change(self, change: PlanChange) -> None:
        """Make one change, with its trouble, and wait until the fleet stands as planned."""
        begun_s = time.monotonic()
        asked = change.asked
        if asked.rate_per_s > self._demand_per_s:
            self._rising = (asked, begun_s + self._lead_s)
        else:
            self._demand_per_s, self._rising = asked.rate_per_s, None
        if change.trouble.startswith("broken"):
            await self._break(change)
        elif change.trouble == "no-room":
            await self._crowd(change)
        else:
            self.ask(asked)
            await self._strike(change)
        await self._until(self._is_complete, f"change {asked.number} ({change.trouble})")
        self.outcome.changes += 1
        self.outcome.troubles[change.trouble or "none"] += 1
        self.outcome.seconds.append(time.monotonic() - begun_s)

    async def _break(self, change: PlanChange) -> None:
        """Have what is started be unable to work until it was seen to fail."""
        what = "program" if change.trouble == "broken-program" else "weights"
        before = self._failures()
        self.ask(change.asked.model_copy(update={"broken": what}))
        await self._until(lambda: self._failures() > before, change.trouble)
        self.outcome.refused += 1
        self.ask(change.asked)

    async def _crowd(self, change: PlanChange) -> None:
        """Let somebody else have all machines of a kind that is to be started, for a while."""
        fresh = Counter(change.asked.templates) - Counter(self.asked.templates)
        kind = min(fresh, key=lambda t: t.nodes).nodes[0][0]
        held = sum(
            node.node_type == kind
            for seen in self._statuses
            if seen.state in ("starting", "ready", "draining")
            for node in self._instance(seen).nodes
        )
        before = self._failures()
        order = _squat(kind, MACHINES - held)
        status = await asyncio.to_thread(self.target.start, order)
        try:
            self.ask(change.asked)
            await self._until(lambda: self._failures() > before, change.trouble)
            self.outcome.refused += 1
        finally:
            await asyncio.to_thread(self.target.stop, status.handle, 0)

    async def _strike(self, change: PlanChange) -> None:
        """Kill something in the middle of the change."""
        if not change.trouble:
            return
        await self._wait(change.after_s)
        if change.trouble == "kill-controller":
            await self.site.kill_controller()
            await self._wait(float(self._chance.uniform(0.0, 1.0)))
            await self.site.start_controller()
            return
        victims = [seen for seen in self._statuses if seen.state in ("starting", "ready")]
        victim = victims[int(self._chance.integers(len(victims)))]
        pid = self._find(victim, change.trouble)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            await self._wait(1.0)

    def _find(self, victim: InstanceStatus, way: str) -> int | None:
        """Return a process of an instance: its daemon, a node's command, or an engine below that."""
        name = victim.labels.instance
        home = self.site.folder / TARGET / f"f-{FLEET}" / f"i-{name}"
        state = DaemonState.from_json((home / STATE).read_text())
        if way == "kill-daemon":
            return state.daemon.pid
        if way == "kill-join" and state.processes:
            return state.processes[int(self._chance.integers(len(state.processes)))].pid
        log = f"/{name}.log" if way == "kill-engine" else f"/{name}.n0.log"
        return self.site.find_logging(log)

    def _failures(self) -> int:
        """Return how many starts were refused or failed until now."""
        events = History(self.site.folder / HISTORY).read()
        return sum(event.kind == "failure" for event in events) + len(self._failed)

    # Looking

    def _instance(self, seen: InstanceStatus) -> Instance:
        name = seen.labels.instance
        if name not in self._known:
            found = InstanceStore(self._store.folder).find(name)
            assert found is not None, name
            self._known[name] = found
        return self._known[name]

    async def look(self) -> None:
        """See what stands, and count the time in which it was too little."""
        statuses, usable = await asyncio.gather(
            asyncio.to_thread(self.target.list, FLEET), self.site.list_usable()
        )
        self._statuses = tuple(statuses)
        self._failed |= {seen.labels.instance for seen in statuses if seen.state == "failed"}
        serving = [self._instance(seen) for seen in statuses if seen.state == "ready"]
        ready = self._carried(serving)
        now_s = time.monotonic()
        if self._rising is not None:
            asked, until_s = self._rising
            if ready >= asked.rate_per_s * asked.headroom * (1.0 - 1e-6) or now_s >= until_s:
                self._demand_per_s, self._rising = asked.rate_per_s, None
        if self._looked_s is not None:
            if ready < self._demand_per_s * (1.0 - 1e-6):
                self.outcome.below_demand_s += now_s - self._looked_s
                states = [(s.labels.instance, s.state, s.reason) for s in statuses]
                self.outcome.notes.append(f"{ready} < {self._demand_per_s}: {states}")
            # Instances that prefill help others, and are asked by no gateway.
            helping = [one for one in serving if one.phase is Phase.PREFILL]
            listening = [one for name, one in self._known.items() if name in usable]
            reached = self._carried([*helping, *listening])
            if reached < self._demand_per_s * (1.0 - 1e-6):
                self.outcome.below_at_gateway_s += now_s - self._looked_s
                self.outcome.notes.append(f"gateway: {reached} < {self._demand_per_s}: {usable}")
            self._looked_s = now_s

    def _carried(self, instances: Sequence[Instance]) -> float:
        """Return the requests/s that instances carry together."""
        problem = self.asked.problem(FLEET)
        return CarriedLoad(problem, find_mixed(problem, instances), instances).lanes()[SERVICE]

    def _is_complete(self) -> bool:
        """Whether just what is planned starts or serves, and all of it serves."""
        serving = [seen for seen in self._statuses if seen.state in ("starting", "ready")]
        if any(seen.state == "starting" for seen in serving):
            return False
        there = Counter(self._instance(seen).placement_key for seen in serving)
        return there == Counter(one.placement_key for one in self.asked.instances())

    async def _wait(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def _until(self, done: Any, what: str) -> None:
        until_s = time.monotonic() + self._change_s
        while True:
            await self.look()
            if done():
                return
            if time.monotonic() > until_s:
                states = [(s.labels.instance, s.state, s.reason) for s in self._statuses]
                raise TimeoutError(f"{what} took too long: {states}")
            await asyncio.sleep(_LOOK_S)


def _squat(kind: str, count: int) -> StartOrder:
    """Return an order that does nothing but hold machines."""
    template = RolloutTemplate(nodes=tuple((kind, 0, 1) for _ in range(count)), per_s=0.0)
    instance = make_instance(_SQUATTER, template, {kind: 0.0})
    labels = Labels(
        fleet=_SQUATTER,
        instance=f"{_SQUATTER}-{time.time_ns()}",
        plan="",
        placement="",
        service=_SQUATTER,
        role="squatter/llm/both",
    )
    commands = tuple(
        NodeCommand(node=node.id, node_type=kind, argv=("sleep", "600"), gpus=1)
        for node in instance.nodes
    )
    return StartOrder(instance, labels, commands)


async def rollout(
    first: AskedOfFleet,
    changes: list[PlanChange],
    seed: int,
    folder: Path,
    *,
    clients: int = CLIENTS,
    tokens: int = MAX_TOKENS,
    lead_s: float = LEAD_S,
    change_s: float = CHANGE_S,
    say: Any = lambda _line: None,
) -> RolloutOutcome:
    """Bring a fleet up in a folder, make all changes, and take it down.

    Answers have up to `tokens` tokens. What is asked more counts `lead_s` after it was said at the latest; a
    change may take `change_s`.
    """
    site = RolloutSite(folder)
    os.environ[TAG] = site.tag
    model = await asyncio.to_thread(write_tiny_model, folder / "model")
    answers = await asyncio.to_thread(learn_answers, model, tokens)
    run = Rollout(site, first, seed, lead_s, change_s)
    outcome = run.outcome
    try:
        await site.open(model)
        await run.bring_up()
        streaming = StreamingClients(site.url, answers, outcome)
        streaming.begin(clients)
        try:
            for change in changes:
                await run.change(change)
                say(
                    f"{change.asked.number:3d} {outcome.seconds[-1]:6.1f} s"
                    f"  {len(change.asked.templates)} instances"
                    f"  {change.asked.rate_per_s:5.2f}/s  {change.trouble}"
                )
        except TimeoutError as error:
            outcome.notes.append(str(error))
        finally:
            await streaming.end()
    finally:
        await site.close(run.target)
        del os.environ[TAG]
    outcome.starts = sum(event.kind == "start" for event in History(folder / HISTORY).read())
    # Guards of what was killed need a moment to end what they supervised.
    until_s = time.monotonic() + _LAST_S
    while (left := site.orphans()) and time.monotonic() < until_s:
        await asyncio.sleep(0.1)
    outcome.orphans = len(left)
    outcome.notes += [f"left: {_command_of(pid)}" for pid in left]
    return outcome


def _command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    return str(pid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="6 changes instead of 30")
    parser.add_argument("--small", action="store_true", help="5 changes that start little")
    parser.add_argument("--changes", type=int, default=None, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a new folder for logs and the history")
    chosen = parser.parse_args()
    if chosen.small:
        first, changes = seed_changes(len(_SMALL), _SMALL_SEED, troubles=_SMALL)
        # However slow the machine: what is asked more counts once the fleet carries it.
        run = partial(rollout, clients=2, tokens=200, lead_s=math.inf, change_s=1200.0)
    else:
        first, changes = seed_changes(chosen.changes or (6 if chosen.quick else 30), chosen.seed)
        run = partial(rollout)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (chosen.keep or Path(temporary)).resolve()
        folder.mkdir(mode=0o700, exist_ok=True)
        print("  n     took  plan")
        seen = asyncio.run(
            run(first, changes, chosen.seed, folder, say=lambda line: print(line, flush=True))
        )
    seconds = time.monotonic() - begun_s
    print(
        f"{seen.starts} instances started, {seen.refused} starts made to fail: {dict(seen.troubles)}"
    )
    print(f"{seen.requests} answers, {seen.tokens} tokens in {seconds:.0f} s")
    for line in seen.notes[:20]:
        print(f"  {line}")
    names = ("errors", "truncated", "token_mismatch", "orphans")
    conclude(
        [
            Figure("changes", seen.changes),
            Figure("unfinished", len(changes) - seen.changes, 0),
            *(Figure(name, getattr(seen, name), 0) for name in names),
            Figure("below_demand_s", round(seen.below_demand_s, 2), 0),
            Figure("below_at_gateway_s", round(seen.below_at_gateway_s, 2), 0),
        ],
        requests=seen.requests,
        tokens=seen.tokens,
        starts=seen.starts,
        failed_starts=seen.refused,
        change_s_median=sorted(seen.seconds)[len(seen.seconds) // 2] if seen.seconds else None,
        seconds=round(seconds, 1),
    )


if __name__ == "__main__":
    main()
