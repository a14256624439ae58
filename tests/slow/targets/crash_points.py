"""A controller that dies at every durable write and every external call, and the one that follows it.

A fleet on the Kubernetes target, against an API in this process and in virtual time: two instances come up,
the plan changes, one machine dies, and the plan changes back. All writes of the controller (its lease, what
instances consist of, plans, history) and all requests to the API and to gateways are counted; the
controller is ended before each of them, and after each before it knows the answer, of a line of history
also halfway. Another controller, with nothing but what was written, takes over and has to come to the state
of a run without a death.

`diverged`: runs that end elsewhere; `duplicates`: instances that were started beyond those of the run
without a death; `orphans`: objects that belong to nothing that serves.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from atoll.control.decision.control_view import ControlPolicy
from atoll.control.operation.control_loop import (
    FleetController,
    FleetPlace,
    InstanceStore,
    PlanInForce,
    TrafficReport,
)
from atoll.control.operation.controller_lease import ClusterLease, LeaseHeldError
from atoll.control.operation.fleet_history import History, HistoryEvent
from atoll.control.operation.targets import PoolTarget
from atoll.core.files import atomic_write
from atoll.deploy.kubernetes.kube_client import HttpAnswer, KubeClient
from atoll.deploy.kubernetes.kube_deployer import KubernetesDeployer
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
from atoll.plan.plan import Route
from benchmarks.report import Figure
from tests.deploy.killed_rollouts import FLEET, KINDS, REGION, order, plan, problem
from tests.deploy.kubernetes.tiny_api import TinyApi
from tests.slow.verdict import conclude

MACHINES = {"L4:1": "NVIDIA-L4", "L40S:1": "NVIDIA-L40S"}
CHANGES = ((KINDS[0], KINDS[0]), (KINDS[1], KINDS[0]), (KINDS[1], KINDS[1]))
"""Kinds of machines that the plan asks for, one after the other; a machine dies after the second."""
POLICY = ControlPolicy(startup_s=10.0, drain_s=60.0, retry_s=0.0, backoff_s=5.0, settled_s=0.0)
_LEASE_S = 30.0
_TURN_S = 5.0
_MAX_TURNS = 60


class ControllerDeath(BaseException):
    """The controller is gone; nothing in it may catch this."""


@dataclass
class DeathClock:
    """Counts points where a controller may die, and ends it at one of them (0: never)."""

    at: int = 0
    places: list[str] = field(default_factory=list)

    def pass_point(self, place: str) -> None:
        """Pass a point, or die there."""
        self.places.append(place)
        if len(self.places) == self.at:
            raise ControllerDeath(place)


class MortalTransport:
    """The API, with a point before each request, and one before its answer is known."""

    def __init__(self, api: TinyApi, death: DeathClock) -> None:
        self._api, self._death = api, death

    def ask(self, method: str, path: str, **words: Any) -> HttpAnswer:
        self._death.pass_point(f"{method} asked")
        answer = self._api.ask(method, path, **words)
        self._death.pass_point(f"{method} answered")
        return answer


class MortalHistory(History):
    """A history whose lines may be torn."""

    def __init__(self, path: Path, death: DeathClock) -> None:
        super().__init__(path)
        self._death = death

    def add(self, *events: HistoryEvent) -> None:
        self._death.pass_point("history begun")
        try:
            self._death.pass_point("history torn")
        except ControllerDeath:
            with self.path.open("ab") as file:
                file.write(events[0].to_json().encode()[:20] if events else b"")
            raise
        super().add(*events)
        self._death.pass_point("history written")


@dataclass
class RecordedGateways:
    """Gateways that remember what they were told; there is a point before and after."""

    death: DeathClock
    routes: Sequence[Route] = ()

    def look(self, now_s: float) -> TrafficReport:
        del now_s
        self.death.pass_point("gateways looked at")
        return TrafficReport()

    def route(self, routes: Sequence[Route]) -> None:
        self.death.pass_point("gateways told")
        self.routes = tuple(routes)
        self.death.pass_point("gateways heard")


@contextmanager
def mortal_files(death: DeathClock) -> Iterator[None]:
    """Put a point before and after each file that is put in place, or removed."""

    def wrap(act: Callable[..., Any], name: str) -> Callable[..., Any]:
        def mortal(*words: Any, **named: Any) -> Any:
            death.pass_point(f"{name} begun")
            done = act(*words, **named)
            death.pass_point(f"{name} done")
            return done

        return mortal

    with (
        mock.patch.object(os, "replace", wrap(os.replace, "file written")),
        mock.patch.object(Path, "unlink", wrap(Path.unlink, "file removed")),
    ):
        yield


@dataclass(frozen=True)
class Outcome:
    """How a run ended: what serves and to whom requests go, all that was started, what is left over.

    `places` are the points in their order.
    """

    serving: tuple[str, ...]
    shares: tuple[tuple[str, float], ...]
    started: int
    orphans: int
    places: tuple[str, ...]


class Cluster:
    """A fleet's cluster and folder, which outlive its controllers."""

    def __init__(self, folder: Path, death: DeathClock) -> None:
        self.folder, self.death = folder, death
        self.api = TinyApi()
        for kind, product in MACHINES.items():
            for number in range(4):
                labels = {"nvidia.com/gpu.product": product, "nvidia.com/gpu.count": "1"}
                self.api.add_node(f"{kind[:-2].lower()}-{number}", labels, 1)
        self.gateways = RecordedGateways(death)
        self.started: set[str] = set()
        self._holders = 0

    def target(self, transport: Any) -> KubernetesDeployer:
        settings = KubernetesSettings(region=REGION)
        clock = lambda: self.api.now_s  # noqa: E731
        return KubernetesDeployer(
            KubeClient(transport, "default"), settings, clock=clock, fleet=FLEET
        )

    def new_controller(self, kinds: Sequence[str]) -> FleetController:
        """A controller that knows only what was written."""
        self._holders += 1
        asked = problem(kinds[0])
        target = self.target(MortalTransport(self.api, self.death))
        place = FleetPlace(
            *(FLEET, asked, {"k": PoolTarget(target, asked.offers)}, self.gateways),
            *(lambda _one: "k", order),
        )
        return FleetController(
            place,
            InstanceStore(self.folder / "instances"),
            MortalHistory(self.folder / "history.jsonl", self.death),
            ClusterLease(target, FLEET),
            plan(kinds),
            holder=f"controller-{self._holders}",
            clock=lambda: self.api.now_s,
            policy=POLICY,
            valid_s=_LEASE_S,
            keep_plan=self._keep_plan,
        )

    def _keep_plan(self, found: PlanInForce) -> None:
        atomic_write(self.folder / "plan.json", found.to_json() + "\n")

    def serving(self) -> list[str]:
        """Kinds of machines of what is ready; empty while anything else stands."""
        statuses = self.target(self.api).list(FLEET)
        if any(each.state != "ready" for each in statuses):
            return []
        store = InstanceStore(self.folder / "instances")
        found = (store.find(each.labels.instance) or each.instance for each in statuses)
        return sorted(one.nodes[0].node_type for one in found if one is not None)

    def live(self) -> None:
        """Let a turn's time pass: pods become ready, or go where they were told to."""
        self.api.advance(_TURN_S)
        self.api.make_ready()
        self.api.end_pods()
        self.started |= {key[2] for key, _ in self.api.of("configmaps")}

    def lose_machine(self) -> None:
        """Have one machine, on which an instance stands, not answer any more; what it ran can be ended."""
        pod = next(iter(self.api.of("pods")))[1]
        name = pod["spec"]["nodeName"]
        self.api.objects["nodes", "", name]["status"]["conditions"][0]["status"] = "Unknown"
        self.api.set_status(
            pod["metadata"]["name"], conditions=[{"type": "Ready", "status": "False"}]
        )

    def count_orphans(self) -> int:
        """Objects of no instance that is ready."""
        kept = {each.handle for each in self.target(self.api).list(FLEET)}
        owned = ("configmaps", "statefulsets", "pods", "services", "secrets")
        return sum(
            made["metadata"].get("labels", {}).get("app.kubernetes.io/instance") not in kept
            for plural in owned
            for _, made in self.api.of(plural)
        )


def run(death_at: int) -> Outcome:
    """Run the scenario, with a death at one point."""
    death = DeathClock(death_at)
    with tempfile.TemporaryDirectory() as folder, mortal_files(death):
        cluster = Cluster(Path(folder), death)
        for number, kinds in enumerate(CHANGES):
            controller = cluster.new_controller(kinds)
            _turn_until_done(cluster, controller, kinds)
            if number == 1:
                cluster.lose_machine()
                _turn_until_done(cluster, controller, kinds)
        shares: defaultdict[str, float] = defaultdict(float)
        store = InstanceStore(cluster.folder / "instances")
        for route in cluster.gateways.routes:
            for name in route.instances:
                one = store.find(name)
                shares[one.nodes[0].node_type if one else f"unknown {name}"] += route.share
        return Outcome(
            tuple(cluster.serving()),
            tuple(sorted((kind, round(share, 6)) for kind, share in shares.items())),
            len(cluster.started),
            cluster.count_orphans(),
            tuple(death.places),
        )


def _turn_until_done(cluster: Cluster, controller: FleetController, kinds: Sequence[str]) -> None:
    """Take turns until just what is wanted serves, and a turn has nothing more to do."""
    for _ in range(_MAX_TURNS):
        try:
            turn = controller.turn()
            idle = not turn.done
        except ControllerDeath:
            # Points after it are another controller's: it lives.
            controller, idle = cluster.new_controller(kinds), False
        except LeaseHeldError:
            idle = False
        cluster.live()
        if idle and cluster.serving() == sorted(kinds):
            return


def main() -> None:
    """Print the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only every 20th point")
    options = parser.parse_args()
    began_s = time.process_time()
    whole = run(0)
    assert whole.serving == tuple(sorted(CHANGES[-1])), whole.serving
    diverged = duplicates = orphans = 0
    points = range(1, len(whole.places) + 1, 20 if options.quick else 1)
    for point in points:
        found = run(point)
        apart = (found.serving, found.shares) != (whole.serving, whole.shares)
        more = max(0, found.started - whole.started)
        if apart or more or found.orphans:
            ended = f"serving {found.serving}, started {found.started}, orphans {found.orphans}"
            print(f"point {point} ({whole.places[point - 1]}): {ended}")
        diverged += apart
        duplicates += more
        orphans += found.orphans
    for place, count in sorted(Counter(whole.places).items()):
        print(f"  {place:24} {count:5}")
    print(f"{time.process_time() - began_s:.0f} CPU-s")
    conclude(
        [
            Figure("points", len(points)),
            Figure("diverged", diverged, 0),
            Figure("duplicates", duplicates, 0),
            Figure("orphans", orphans, 0),
        ],
    )


if __name__ == "__main__":
    main()
