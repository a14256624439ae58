"""Executors of a request: its class, a path of the plan, an executor for each step.

All are assigned when a request comes, by the same interleaved weighted round robin as instances
(`atoll.routing.decisions`): after any number of requests everyone is within one of its share.
Nothing here does I/O; who is dead is told by whoever asks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from atoll.plan.plan import RequestPath
from atoll.routing.decisions import round_robin
from atoll.runtime.graph_server.graph_config import ExecutorAddress, GraphService
from atoll.workload.classes import Brought, match_class, parse_class_name


class WeightedRoundRobin:
    """Chooses names by weight, smoothly; the share of those that are closed goes to the others."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.names = tuple(weights)
        self._numbers = {name: number for number, name in enumerate(self.names)}
        size = len(self.names)
        given = np.array([weights[name] for name in self.names], dtype=np.float64)
        # A plan may give nobody a weight; then all count alike.
        self._weight = given if given.sum() > 0.0 else np.ones(size)
        self._first = np.array([0, size])
        self._target = np.arange(size)
        self._order = np.arange(size)
        self._credit = np.zeros(size)

    def choose(self, closed: Collection[str] = ()) -> str | None:
        """Return whose turn it is, None if all are closed.

        Those without weight are chosen only where nobody else is left, the first of them.
        """
        shut = np.zeros(len(self.names), dtype=np.bool_)
        for name in closed:
            if name in self._numbers:
                shut[self._numbers[name]] = True
        edge = round_robin(
            self._first, self._target, self._weight, self._order, self._credit, 0, shut
        )
        if edge >= 0:
            return self.names[edge]
        return next((name for name in self.names if name not in closed), None)


class RequestRoute:
    """The executors of one request: those of its path, and others as they are needed.

    An executor is kept for all invocations of a component until it fails; `replace` then names another one
    for the rest of the request. Pieces of a cut stream go to it too, but while it is at work on one of them
    the next goes to a copy of it (`spread`): their answers are put in order whoever gives them.
    """

    def __init__(
        self,
        klass: str,
        steps: Sequence[tuple[tuple[str, ...], str, WeightedRoundRobin]],
        router: PathRouter,
    ) -> None:
        self.klass = klass
        """The class of the plan whose path it takes, "" where no class fits."""
        self._router = router
        self._parts: dict[str, str] = {}
        self.executors: dict[str, str] = {}
        """Executor ids by component."""
        self._copies: dict[str, WeightedRoundRobin] = {}
        for parts, executor, copies in steps:
            for part in parts:
                # The first step that names a part decides.
                self._parts.setdefault(part, executor)
                for component in router.components_of(part):
                    if router.runs(executor, component):
                        self.executors.setdefault(component, executor)
                        self._copies.setdefault(component, copies)

    def executor(self, component: str, closed: Collection[str] = ()) -> str | None:
        """Return the executor of a component that is not closed: the one it has, else another; None: none."""
        kept = self.executors.get(component)
        if kept is not None and kept not in closed:
            return kept
        found = self._router.assign(component, closed)
        if found is not None:
            self.replace(component, found)
        return found

    def spread(
        self, component: str, pieces: Mapping[str, int], closed: Collection[str] = ()
    ) -> str | None:
        """Return the executor of a piece of a cut stream, where executors work on so many others.

        It is the one the component has, unless another works on fewer: of those that the step of its path
        names, by the same weights, or of all where no path names any.
        """
        own = self.executor(component, closed)
        most = 0 if own is None else pieces.get(own, 0)
        if most == 0:
            return own
        taken = {*closed, *(name for name, count in pieces.items() if count >= most)}
        copies = self._copies.get(component)
        if copies is None:
            return self._router.assign(component, taken) or own
        others = {name for name in copies.names if not self._router.runs(name, component)}
        return copies.choose(taken | others) or own

    def replace(self, component: str, executor: str) -> None:
        """Use another executor for a component from now on."""
        self.executors[component] = executor

    def describe(self) -> str:
        """Return the executors by part, as in "audio=hear-0;llm=think-0"; by component without a path."""
        shown = dict(self._parts)
        for component, executor in self.executors.items():
            shown[self._router.part_of(component, shown)] = executor
        return ";".join(f"{part}={executor}" for part, executor in shown.items())


class PathRouter:
    """Assigns the paths and executors of one service."""

    def __init__(self, service: GraphService, executors: Sequence[ExecutorAddress]) -> None:
        self._service = service
        self._runs: dict[str, frozenset[str]] = {}
        self._turns: dict[str, WeightedRoundRobin] = {}
        steps = (step for path in service.paths for step in path.steps)
        self.components = frozenset(
            c for step in steps for part in step.parts for c in self.components_of(part)
        )
        """The components that paths lead over."""
        self.use(executors)
        self._paths: dict[Brought, list[RequestPath]] = {}
        for path in service.paths:
            self._paths.setdefault(parse_class_name(path.klass), []).append(path)
        self._path_turns = {
            klass: WeightedRoundRobin({str(n): path.share for n, path in enumerate(paths)})
            for klass, paths in self._paths.items()
        }
        self._step_turns = {
            (klass, n, m): WeightedRoundRobin(step.instances)
            for klass, paths in self._paths.items()
            for n, path in enumerate(paths)
            for m, step in enumerate(path.steps)
        }
        self._own = {
            name for path in service.paths for step in path.steps for name in step.instances
        }

    def use(self, executors: Sequence[ExecutorAddress]) -> None:
        """Know these executors from now on; paths stay as they are."""
        runs = {executor.id: frozenset(executor.components) for executor in executors}
        if runs != self._runs:
            self._runs = runs
            self._turns.clear()

    def components_of(self, part: str) -> tuple[str, ...]:
        """Return the components that a part of the plan's model stands for."""
        return self._service.parts.get(part, (part,))

    def part_of(self, component: str, among: Collection[str] = ()) -> str:
        """Return the part that a component belongs to, itself where there is none (of `among`)."""
        for part, components in self._service.parts.items():
            if component in components and part in among:
                return part
        return component

    def runs(self, executor: str, component: str) -> bool:
        """Return whether an executor runs a component."""
        return component in self._runs.get(executor, ())

    def candidates(self, component: str) -> tuple[str, ...]:
        """Return every executor that runs a component."""
        return tuple(name for name, runs in self._runs.items() if component in runs)

    def assign(self, component: str, closed: Collection[str] = ()) -> str | None:
        """Return the next of all executors that run a component, None if none is open.

        Those on no path of the service are asked where none of the others is open.
        """
        turns = self._turns.get(component)
        if turns is None:
            names = self.candidates(component)
            turns = self._turns[component] = WeightedRoundRobin(dict.fromkeys(names, 1.0))
        others = {name for name in turns.names if self._own and name not in self._own}
        return turns.choose({*closed, *others}) or turns.choose(closed)

    def route(self, brought: Brought, dead: Collection[str] = ()) -> RequestRoute:
        """Return the route of a request that brings and wants so much.

        Its class is the one of the plan that brings and wants the same, else the smallest that has all of
        it; labels in brackets are not looked at. Paths and executors that are dead are left out as long as
        others live; without any path its executors are assigned one by one.
        """
        klass = match_class(brought, self._paths)
        if klass is None:
            return RequestRoute("", (), self)
        paths = self._paths[klass]
        broken = [
            str(n)
            for n, path in enumerate(paths)
            if any(all(name in dead for name in step.instances) for step in path.steps)
        ]
        turns = self._path_turns[klass]
        # Where every path is broken one is taken all the same: executors may come back.
        chosen = turns.choose(broken if len(broken) < len(paths) else ())
        assert chosen is not None
        number = int(chosen)
        steps: list[tuple[tuple[str, ...], str, WeightedRoundRobin]] = []
        for m, step in enumerate(paths[number].steps):
            turns = self._step_turns[klass, number, m]
            executor = turns.choose(dead)
            # Without one the component is assigned when it is asked for.
            if executor is not None:
                steps.append((step.parts, executor, turns))
        return RequestRoute(paths[number].klass, steps, self)
