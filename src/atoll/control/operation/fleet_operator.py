"""Fleets as objects of a Kubernetes cluster: `kind: Fleet`, each with a controller that keeps it.

    apiVersion: atoll-serving.github.io/v1alpha1
    kind: Fleet
    metadata: {name: lab}
    spec:
      fleet: {services: ..., pool: ...}      the fleet file
      target: {image: atoll:1.2}             settings of the target, over those of the operator

The operator writes a fleet's file into the folder of a controller, which is `atoll operate` as anybody runs
it, a process for each fleet, and into the object's status what became of it. A Fleet that is deleted is
taken down first. Several operators may run: a controller acts only with the fleet's Lease, and only the
operator whose controller has it writes the status.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

from atoll.control.operation.fleet_home import FleetHome, is_holder
from atoll.control.operation.fleet_status import FleetStatus, look_at_fleet
from atoll.core.errors import AtollError, InputError, shorten
from atoll.core.files import atomic_write
from atoll.deploy.kubernetes.kube_client import KubeClient
from atoll.deploy.kubernetes.kube_lease import LeaseHolder, write_time
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
from atoll.deploy.kubernetes.labels import DOMAIN
from atoll.deploy.target import DeployError
from atoll.plan.files.read import read_problem

Json = dict[str, Any]

VERSION = f"{DOMAIN}/v1alpha1"
FINALIZER = f"{DOMAIN}/down"
MAX_DECISIONS = 10
MAX_INSTANCES = 100
_MAX_TEXT = 500
_OPERATORS = {"namespace", "kubeconfig", "context"}
"""Settings of the target that say where instances go, and with whose rights: not a Fleet's to choose."""


class ControllerProcess(Protocol):
    """A process that operates a fleet, or takes it down."""

    pid: int

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        ...

    def terminate(self) -> None:
        """Have it end after its turn."""
        ...


Start = Callable[[Sequence[str]], ControllerProcess]
"""Starts `atoll` with these arguments."""


def start_atoll(arguments: Sequence[str]) -> ControllerProcess:
    """Start `atoll` as a process of its own."""
    return subprocess.Popen([sys.executable, "-m", "atoll", *arguments], stdin=subprocess.DEVNULL)


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """How controllers are run.

    `folder` has the files and homes of fleets, `target` the settings of the target for all of them, and
    `arguments` are passed on to `atoll operate`: the gateway's address, how often to look.
    """

    folder: Path
    target: KubernetesSettings
    arguments: tuple[str, ...] = ()


@dataclass(slots=True)
class _Kept:
    """A fleet that has a controller; `written` is what its files were made of."""

    process: ControllerProcess | None = None
    written: str = ""
    taking_down: bool = False
    problem: str = ""
    shown: Json = field(default_factory=dict)


class ClusterOperator:
    """Keeps a controller for each Fleet of a namespace; `turn` is one look at all of them."""

    def __init__(
        self,
        client: KubeClient,
        settings: OperatorSettings,
        *,
        start: Start = start_atoll,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client, self._settings, self._start, self._clock = client, settings, start, clock
        self._kept: dict[str, _Kept] = {}

    def turn(self) -> None:
        """Look at all Fleets; DeployError where the API refuses. One fleet's fault keeps no other waiting."""
        seen = {each["metadata"]["name"]: each for each in self._client.select("Fleet")}
        for name in sorted(self._kept.keys() - seen.keys()):
            # Gone without our finalizer, by somebody's force: what it left goes on, as they wanted.
            self._stop(self._kept.pop(name))
        faults: list[DeployError] = []
        for name, fleet in sorted(seen.items()):
            kept = self._kept.setdefault(name, _Kept())
            try:
                if fleet["metadata"].get("deletionTimestamp"):
                    self._take_down(name, fleet, kept)
                else:
                    self._keep(name, fleet, kept)
            except DeployError as error:
                faults.append(error)
        if faults:
            raise faults[0]

    def close(self) -> None:
        """End all controllers; fleets go on serving."""
        for kept in self._kept.values():
            self._stop(kept)

    # One fleet

    def _keep(self, name: str, fleet: Json, kept: _Kept) -> None:
        if FINALIZER not in fleet["metadata"].get("finalizers", ()):
            self._client.apply(self._manifest(name, {"finalizers": [FINALIZER]}))
        try:
            self._write(name, fleet.get("spec") or {}, kept)
            kept.problem = ""
        except AtollError as error:
            kept.problem = str(error)
        if kept.process is not None and kept.process.poll() is not None:
            kept.process = None
        if kept.process is None and kept.written:
            kept.process = self._start(["operate", *self._options(name), "--yes"])
        self._show(name, fleet, kept)

    def _write(self, name: str, spec: Mapping[str, Any], kept: _Kept) -> None:
        """Write a fleet's files where its spec has changed; one that cannot be read changes nothing."""
        text = json.dumps(spec, sort_keys=True)
        if text == kept.written:
            return
        folder = self._folder(name)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fleet = spec.get("fleet")
        if not isinstance(fleet, Mapping):
            raise InputError("expected a fleet file as an object", field="spec.fleet")
        draft = folder / "draft.yaml"
        atomic_write(draft, yaml.safe_dump({**fleet, "name": name}, sort_keys=False))
        try:
            read_problem(draft)
        except InputError as error:
            where = f"spec.fleet.{error.field}" if error.field else "spec.fleet"
            raise InputError(error.message, field=where, hint=error.hint) from error
        given = dict(spec.get("target") or {})
        for key in sorted(_OPERATORS & given.keys()):
            raise InputError(
                "it is the operator's", field=f"spec.target.{key}", hint="leave it out"
            )
        target = KubernetesSettings.parse(
            self._settings.target.model_dump(exclude_unset=True) | given
        )
        settings = {"kubernetes": target.model_dump(mode="json", exclude_unset=True)}
        restarts = self._target_file(name).exists() and kept.process is not None
        before = self._target_file(name).read_text() if restarts else ""
        atomic_write(self._target_file(name), yaml.safe_dump(settings, sort_keys=False))
        # The controller reads the fleet file again by itself, settings of targets only as it begins.
        draft.replace(self._fleet_file(name))
        if restarts and before != self._target_file(name).read_text():
            self._stop(kept)
        kept.written = text

    def _take_down(self, name: str, fleet: Json, kept: _Kept) -> None:
        """End the controller, then the fleet, and let the object go when nothing is left."""
        if FINALIZER not in fleet["metadata"].get("finalizers", ()):
            return
        if not kept.taking_down and kept.process is not None:
            kept.process.terminate()
            if kept.process.poll() is None:
                return
            kept.process = None
        if not kept.taking_down and self._home(name).read() is not None:
            home = str(self._home(name).folder)
            kept.process, kept.taking_down = self._start(["down", "--state", home, "--yes"]), True
        if kept.process is not None:
            code = kept.process.poll()
            if code is None:
                return
            kept.process = None
            if code != 0:
                # Tried again: a target that does not answer has not let go of anything.
                kept.taking_down = False
                self._say(
                    name, fleet, kept, {"phase": "Deleting"}, f"`atoll down` ended with {code}"
                )
                return
        self._client.apply(self._manifest(name, {}))

    def _stop(self, kept: _Kept) -> None:
        if kept.process is not None and kept.process.poll() is None:
            kept.process.terminate()
        kept.process = None

    # What it says

    def _show(self, name: str, fleet: Json, kept: _Kept) -> None:
        """Write the status, where this operator's controller is the one that acts, or nobody does."""
        now_s = self._clock()
        home = self._home(name)
        record = home.read()
        holder = LeaseHolder(self._client, name, "").find_holder(now_s) or ""
        acts = kept.process is not None and is_holder(holder, kept.process.pid)
        if record is not None and acts:
            status = self._describe(look_at_fleet(home, record, now_s), home)
            self._say(name, fleet, kept, status, kept.problem)
        elif kept.problem and not holder:
            self._say(name, fleet, kept, {"phase": "Invalid"}, kept.problem)

    def _describe(self, status: FleetStatus, home: FleetHome) -> Json:
        found = home.read_plan()
        ready = sum(row.state == "ready" for row in status.instances)
        alive = [row for row in status.instances if row.state != "gone"]
        events = [e for e in home.history.read(last=200) if e.kind in ("plan", "failure", "note")]
        plan: Json = {}
        if found is not None:
            plan = {
                "hash": found.hash,
                "madeAt": write_time(found.made_s),
                "usdPerHour": f"{found.plan.usd_per_hour:.4f}",
                "solver": found.plan.solver,
                "served": {
                    service: f"{share:.4f}" for service, share in found.plan.served_fraction.items()
                },
            }
        return {
            "phase": "Ready" if alive and ready == len(alive) else "Changing",
            "ready": f"{ready}/{len(alive)}",
            "usdPerHour": f"{status.usd_per_hour:.2f}",
            "controller": status.controller or "",
            "plan": plan,
            "instances": [
                {
                    "name": row.instance,
                    "service": row.service,
                    "state": row.state,
                    "hosts": list(row.hosts),
                    "reason": shorten(row.reason, _MAX_TEXT),
                }
                for row in alive[:MAX_INSTANCES]
            ],
            "promises": [
                {
                    "service": row.service,
                    "requestsPerSecond": f"{row.requests_per_s:.3f}",
                    "judged": row.judged,
                    "kept": f"{row.kept / row.judged:.4f}" if row.judged else "",
                }
                for row in status.traffic
            ],
            "decisions": [
                {
                    "at": write_time(event.at_s),
                    "kind": event.kind,
                    "text": shorten(" ".join(event.text.split()), _MAX_TEXT),
                }
                for event in events[-MAX_DECISIONS:]
            ],
        }

    def _say(self, name: str, fleet: Json, kept: _Kept, status: Json, problem: str) -> None:
        """Write a status, unless it says what it said before."""
        status = copy.deepcopy(status)
        before = {
            each.get("type"): each for each in (fleet.get("status") or {}).get("conditions") or ()
        }
        ready = status["phase"] == "Ready" and not problem
        status["conditions"] = [
            self._condition("Accepted", not problem, problem or "the fleet file is read", before),
            self._condition("Ready", ready, status.get("ready") or status["phase"], before),
        ]
        status["observedGeneration"] = fleet["metadata"].get("generation", 0)
        if status != kept.shown:
            self._client.apply_status({**self._manifest(name, {}), "status": status})
            kept.shown = status

    def _condition(self, kind: str, is_so: bool, text: str, before: Mapping[Any, Json]) -> Json:
        word = "True" if is_so else "False"
        known = before.get(kind) or {}
        since = known.get("lastTransitionTime") if known.get("status") == word else None
        return {
            "type": kind,
            "status": word,
            "reason": "AsAsked" if is_so else "NotYet",
            "message": shorten(text, _MAX_TEXT),
            "lastTransitionTime": since or write_time(self._clock())[:19] + "Z",
        }

    # Where things are

    def _manifest(self, name: str, metadata: Json) -> Json:
        return {
            "apiVersion": VERSION,
            "kind": "Fleet",
            "metadata": {"name": name, "namespace": self._client.namespace, **metadata},
        }

    def _folder(self, name: str) -> Path:
        return self._settings.folder / name

    def _home(self, name: str) -> FleetHome:
        return FleetHome(self._folder(name) / "home")

    def _fleet_file(self, name: str) -> Path:
        return self._folder(name) / "fleet.yaml"

    def _target_file(self, name: str) -> Path:
        return self._folder(name) / "targets.yaml"

    def _options(self, name: str) -> list[str]:
        return [
            str(self._fleet_file(name)),
            f"--state={self._home(name).folder}",
            "--on=kubernetes",
            f"--target-file={self._target_file(name)}",
            *self._settings.arguments,
        ]


def run_operator(
    operator: ClusterOperator,
    look_s: float,
    wait: Callable[[float], bool],
    say: Callable[[str], None],
) -> None:
    """Take turns until `wait` returns True; what the API refuses is said once, and tried again."""
    said = ""
    try:
        while True:
            try:
                operator.turn()
                said = ""
            except DeployError as error:
                if str(error) != said:
                    said = str(error)
                    say(said)
            if wait(look_s):
                return
    finally:
        operator.close()
