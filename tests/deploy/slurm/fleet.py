"""A fleet on a real cluster: a hub, a gateway, the controller, and clients that stream all the time."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from atoll.control.decision.control_view import ControlPolicy
from atoll.control.decision.decide import StartInstance
from atoll.control.operation.control_loop import (
    FleetController,
    FleetPlace,
    InstanceStore,
    TrafficReport,
)
from atoll.control.operation.controller_lease import FileLease
from atoll.control.operation.fleet_history import History
from atoll.deploy.commands.node_commands import CommandSettings, ServiceWeights, node_commands
from atoll.deploy.slurm.runner import ProcessRunner
from atoll.deploy.slurm.slurm_deployer import SlurmDeployer
from atoll.deploy.slurm.slurm_settings import SlurmSettings
from atoll.deploy.target import Deployer, InstanceStatus, StartOrder
from atoll.plan.plan import SINK, SOURCE, Flow, Instance, Node, Plan, Route
from atoll.plan.problem import Lengths, Offer, Problem, Service, Settings
from atoll.runtime.http.listen_address import free_ports
from tests.deploy.slurm_cluster import SlurmCluster
from tests.tiny_model import LAYERS

FLEET, SERVICE = "lab", "chat"
ROOT = Path(__file__).resolve().parents[3]
TOKENS = 700
_START_S = 60.0

Shape = tuple[tuple[str, int, int], ...]
"""The node types of an instance, each with the layers it holds."""
ALONE: Shape = (("L4:2", 0, LAYERS),)
UNEVEN: Shape = (("L4:2", 0, 3), ("T4:4", 3, LAYERS))
POLICY = ControlPolicy(
    epoch_s=3600.0,
    startup_s=20.0,
    ready_within_s=180.0,
    drain_s=90.0,
    move_s=20.0,
    retry_s=1.0,
    backoff_s=2.0,
    backoff_max_s=4.0,
    settled_s=1.0,
)


def make_instance(name: str, shape: Shape) -> Instance:
    nodes = tuple(
        Node(id=f"n{at}", node_type=kind, market="on-demand", start=start, end=end, tp=1)
        for at, (kind, start, end) in enumerate(shape)
    )
    ends = [SOURCE, *(node.id for node in nodes), SINK]
    return Instance(
        id=name,
        service=SERVICE,
        role=f"{SERVICE}/llm/both",
        region="slurm",
        stages=len(nodes),
        nodes=nodes,
        flows=tuple(Flow(src=a, dst=b, per_s=1.0) for a, b in pairwise(ends)),
        throughput_per_s=1.0,
        usd_per_hour=0.0,
    )


def make_problem(rate_per_s: float) -> Problem:
    service = Service(
        name=SERVICE,
        model="smollm2-135m",
        ttft_s=5.0,
        tpot_s=1.0,
        rate_per_s=rate_per_s,
        lengths=Lengths(
            input_mean=60.0, output_mean=60.0, input_mean_square=4000.0, output_mean_square=4000.0
        ),
        phases="together",
    )
    offers = tuple(
        Offer(region="slurm", node_type=kind, available=1, usd_per_hour=0.0)
        for kind in ("L4:2", "T4:4")
    )
    return Problem(name=FLEET, services=(service,), offers=offers, settings=Settings())


def make_plan(asked: Problem, shapes: Sequence[Shape]) -> Plan:
    instances = tuple(make_instance(f"{SERVICE}-{at}", shape) for at, shape in enumerate(shapes))
    share = 1.0 / len(instances)
    return Plan(
        problem_hash=asked.content_hash(),
        problem_name=asked.name,
        instances=instances,
        routes=tuple(Route(service=SERVICE, instances=(i.id,), share=share) for i in instances),
        served_fraction={SERVICE: 1.0},
        usd_per_hour=0.0,
        status="feasible",
        solver="by hand",
    )


class QuietGateways:
    """Gateways find instances in the fabric; nothing is measured."""

    def look(self, now_s: float) -> TrafficReport:
        del now_s
        return TrafficReport()

    def route(self, routes: Sequence[Route]) -> None:
        del routes


class StreamingClient(threading.Thread):
    """Streams greedy answers, one after the other, and notes all that is wrong with them."""

    def __init__(self, url: str, answers: Sequence[tuple[str, str]]) -> None:
        super().__init__(daemon=True)
        self._url, self._answers = urlsplit(url), answers
        self._over = threading.Event()
        self.whole = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        number = 0
        while not self._over.is_set():
            prompt, expected = self._answers[number % len(self._answers)]
            number += 1
            try:
                text, ended = self.ask(prompt)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.wrong.append(repr(error))
                time.sleep(0.5)
                continue
            if not ended:
                self.wrong.append(f"cut after {len(text)} characters")
            elif text != expected:
                self.wrong.append(f"{text[:40]!r}... is not {expected[:40]!r}...")
            else:
                self.whole += 1

    def ask(self, prompt: str) -> tuple[str, bool]:
        """Return what was streamed, and whether it came to its end."""
        body = {
            "model": SERVICE, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        way = http.client.HTTPConnection(str(self._url.hostname), self._url.port, timeout=120)
        try:
            headers = {"Content-Type": "application/json"}
            way.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = way.getresponse()
            said = answer.read().decode()
        finally:
            way.close()
        if answer.status != 200:
            raise ValueError(f"{answer.status}: {said[:300]}")
        events = [line[6:] for line in said.split("\n\n") if line.startswith("data: ")]
        chunks: list[dict[str, Any]] = [json.loads(e) for e in events if e != "[DONE]"]
        wrong = [chunk for chunk in chunks if "error" in chunk]
        if wrong:
            raise ValueError(str(wrong[0]))
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        ended = bool(choices) and choices[-1]["finish_reason"] == "length"
        return "".join(c["text"] for c in choices), ended and events[-1:] == ["[DONE]"]

    def end(self) -> None:
        """Finish the answer that runs."""
        self._over.set()
        self.join(180)


def learn_answers(model: Path) -> list[tuple[str, str]]:
    """Return prompts with the whole model's greedy answers."""
    import torch
    import transformers
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    known = []
    for number in range(3):
        prompt = f"Prompt number {number * 7919}: " * (1 + number)
        given = torch.tensor([tokenizer.encode(prompt).ids])
        with torch.no_grad():
            answer = whole.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
            )
        known.append((prompt, tokenizer.decode(answer[0, given.shape[1] :].tolist())))
    return known


@dataclass
class StreamedFleet:
    """Everything that a fleet needs, in a folder; `shapes` are what the planner answers."""

    folder: Path
    model: Path
    shapes: list[Shape]
    atoll: tuple[str, ...] = ("atoll",)
    python: str = "python3"
    url: str = ""
    clients: list[StreamingClient] = field(default_factory=list)
    controllers: int = 0
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def open(self) -> None:
        """Start hub and gateway, and make a controller."""
        (port,) = free_ports(1)
        token = self.folder / "fabric.token"
        token.touch(mode=0o600)
        token.write_text(f"open://127.0.0.1:{port}", "utf-8")
        self._start("hub", "hub", "--open", "--listen", f"127.0.0.1:{port}", says="listens at")
        said = self._start(
            "gateway",
            *("gateway", "--fabric", f"@{token}", "--open", "--port", "0", "--json"),
            *("--log", str(self.folder / "gateway.jsonl")),
            says='"url"',
        )
        self.url = json.loads(said)["url"]
        self.target = self.make_target()
        self.control = self.make_controller()

    def make_target(self) -> Deployer:
        """Return where instances stand."""
        raise NotImplementedError

    def make_controller(self) -> FleetController:
        """Return a controller that knows nothing yet."""
        self.controllers += 1
        place = FleetPlace(
            FLEET,
            make_problem(float(len(self.shapes))),
            {self.target.name: self.target},
            QuietGateways(),
            lambda _instance: self.target.name,
            self._order,
        )
        return FleetController(
            place,
            InstanceStore(self.folder / "instances"),
            History(self.folder / "history.jsonl"),
            FileLease(self.folder / "lease.json"),
            lambda asked: make_plan(asked, self.shapes),
            holder=f"controller-{self.controllers}",
            clock=time.time,
            policy=POLICY,
            valid_s=10.0,
        )

    def _order(self, action: StartInstance, plan: Plan) -> StartOrder:
        del plan
        settings = CommandSettings(
            fabric=str(self.folder / "fabric.token"),
            atoll=self.atoll,
            python=self.python,
            device="cpu",
            dtype="float32",
            kv_bytes=8 * 2**20,
            alone=False,
            drain_s=60.0,
            ready_s=150.0,
        )
        weights = ServiceWeights(str(self.model), (SERVICE,), engine="atoll")
        commands = node_commands(action.instance, weights, settings, labels=action.labels)
        return StartOrder(action.instance, action.labels, commands, ready_s=150.0)

    def _start(self, name: str, *arguments: str, says: str) -> str:
        environment = {**os.environ, "ATOLL_STATE": str(self.folder / "state")}
        environment.pop("ATOLL_FABRIC", None)
        with (self.folder / f"{name}.log").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "atoll", *arguments],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._processes.append(process)
        assert process.stdout is not None
        for line in process.stdout:
            if says in line:
                return line
        raise AssertionError(f"{name} ended: {(self.folder / f'{name}.log').read_text('utf-8')}")

    def stream(self, answers: Sequence[tuple[str, str]], count: int) -> None:
        """Begin to ask through the gateway."""
        self.clients = [StreamingClient(self.url, answers) for _ in range(count)]
        for client in self.clients:
            client.start()

    def turn_until(self, is_so: Callable[[], object], what: str, within_s: float = 240.0) -> None:
        """Let the controller act until something is so."""
        # Turns are counted, not seconds: a machine that was busy elsewhere has not failed.
        for _ in range(int(within_s / 0.5)):
            turn = self.control.turn()
            assert not turn.failures, turn.failures
            if is_so():
                return
            time.sleep(0.4)
        raise AssertionError(f"not within {within_s:g} s: {what}; {self.statuses()}")

    def statuses(self) -> dict[str, InstanceStatus]:
        """Return what stands and has stood, by name."""
        return {each.labels.instance: each for each in self.target.list(FLEET)}

    def ready(self) -> dict[str, InstanceStatus]:
        """Return what serves, by name."""
        return {name: each for name, each in self.statuses().items() if each.state == "ready"}

    def wait_streams(self, more: int) -> None:
        """Wait until every client has got so many more whole answers."""
        wanted = [client.whole + more for client in self.clients]

        def is_so() -> bool:
            self.assert_streams()
            return all(c.whole >= w for c, w in zip(self.clients, wanted, strict=True))

        self.turn_until(is_so, "answers come")

    def assert_streams(self) -> None:
        """No client has seen anything but whole, right answers."""
        wrong = [each for client in self.clients for each in client.wrong]
        assert not wrong, wrong

    def wait_empty(self) -> None:
        """Wait until nothing of this fleet is left that the next one would find."""

    def close(self) -> None:
        """End clients, jobs, gateway and hub."""
        for client in self.clients:
            client.end()
        for each in self.statuses().values():
            if each.state not in ("gone", "failed"):
                self.target.stop(each.handle, 2**31)
        self.wait_empty()
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


@dataclass
class SlurmFleet(StreamedFleet):
    """A fleet in a partition of a real Slurm."""

    cluster: SlurmCluster = field(kw_only=True)
    partition: str = field(kw_only=True)

    def make_target(self) -> Deployer:
        """Return the partition."""
        settings = SlurmSettings(
            work_folder=str(self.folder / "work"),
            partitions=(self.partition,),
            python=sys.executable,
            atoll=(sys.executable, "-m", "atoll"),
            notice_s=20,
        )
        return SlurmDeployer(settings, runner=ProcessRunner(self.cluster.environment))

    def wait_empty(self) -> None:
        """Wait until no job is left."""
        for _ in range(200):
            if not self.cluster.run("squeue", "--noheader").strip():
                break
            time.sleep(0.3)
