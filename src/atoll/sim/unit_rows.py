"""Abilities of a unit: its step times, its room for KV cache, and the limits of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InputError
from atoll.core.ids import Phase
from atoll.engines.profile import EngineProfile
from atoll.engines.table import is_asked_in_turn
from atoll.perf.batch import Batch
from atoll.perf.step import analytic, step_seconds
from atoll.plan.capacities import kv_context, memory_model
from atoll.plan.cluster import NodeProfile
from atoll.plan.cluster_profiles import service_profiles
from atoll.plan.plan import Instance
from atoll.plan.problem import Problem
from atoll.sim.sim_arrays import Floats
from atoll.sim.sim_options import SimOptions
from atoll.sim.times import TimesBuilder

PROMPTS_IN_STEP = 1024
NO_LIMIT = 1 << 40


@dataclass(frozen=True)
class UnitRow:
    """Where the step times of a unit are, its KV room in tokens, and the limits of a step."""

    kind: int
    row: int
    room: float
    max_sequences: int
    max_prompts: int
    budget: int
    chunked: bool
    ahead: bool
    prompts_first: bool
    interval: int
    collects: bool
    front_s: float
    stream_s: float
    tokenize_s: float
    rows: int
    guess: int
    ranks: int


class UnitMaker:
    """Works out what units can do; equal ones once."""

    def __init__(self, problem: Problem, catalog: Catalog, options: SimOptions) -> None:
        self._problem, self._catalog, self._options = problem, catalog, options
        self._profiles: dict[str, dict[str, NodeProfile]] = {}
        self._rows: dict[tuple[object, ...], UnitRow] = {}
        self._curves: dict[tuple[object, ...], Floats] = {}
        self.times = TimesBuilder()

    def _profile(self, instance: Instance, index: int) -> NodeProfile | None:
        """The measured profile of a node of a cluster; None where the performance model speaks."""
        cluster = self._problem.cluster
        if cluster is None or not cluster.profiles:
            return None
        service = self._problem.service(instance.service)
        if service.name not in self._profiles:
            self._profiles[service.name] = service_profiles(self._problem, self._catalog, service)
        node = instance.nodes[index]
        return self._profiles[service.name].get(
            node.node_type if node.gpu_ids is None else node.kind
        )

    def groups(self, instance: Instance, index: int) -> int:
        """Return how many units a node is; a measured profile is of the whole node."""
        node = instance.nodes[index]
        return 1 if self._profile(instance, index) is not None else node.gpus // node.tp

    def row(self, instance: Instance, index: int) -> UnitRow:
        """Return what each unit of a node can do."""
        node = instance.nodes[index]
        run_by = (instance.engine, instance.slots)
        key = (instance.role, run_by, node.kind, node.tp, node.start, node.end)
        if key not in self._rows:
            profile = self._profile(instance, index)
            if profile is None:
                self._rows[key] = self._build_modelled(instance, index)
            else:
                self._rows[key] = self._build_measured(instance, index, profile)
        return self._rows[key]

    def decode_curve(self, instance: Instance, index: int, sequences: Floats) -> Floats:
        """Return the seconds of decode steps of a node's unit with so many sequences of mean context."""
        node = instance.nodes[index]
        key = (instance.role, instance.engine, node.kind, node.tp, node.start, node.end)
        if key not in self._curves:
            profile = self._profile(instance, index)
            if profile is None:
                service = self._problem.service(instance.service)
                spec = self._catalog.model(service.model).llm
                problem = self._problem.run_by(instance.engine)
                kind, engine = self._catalog.node(node.kind), problem.engine_of(service)
                model = analytic(
                    spec, kind, tp=node.tp, engine=engine, constants=self._options.constants
                )
                zero = np.zeros_like(sequences)
                context = zero + service.lengths.mix().decode_context
                batch = Batch(zero, zero, zero, sequences, context)
                found = np.asarray(step_seconds(model, batch, node.start, node.end))
            else:
                x, y = np.array(profile.decode_s_per_layer).T
                found = np.interp(sequences, x, y) * node.layers + profile.step_s
            self._curves[key] = found
        return self._curves[key]

    def _build_modelled(self, instance: Instance, index: int) -> UnitRow:
        problem, node, phase = (
            self._problem.run_by(instance.engine),
            instance.nodes[index],
            instance.phase,
        )
        service = problem.service(instance.service)
        kind, engine = self._catalog.node(node.kind), problem.engine_of(service)
        spec = self._catalog.model(service.model).llm
        model = analytic(spec, kind, tp=node.tp, engine=engine, constants=self._options.constants)
        if node.layers < spec.layers:
            model = replace(model, engine=model.engine.of_stage())
        memory = memory_model(problem, self._catalog, service, phase, kind, node.tp)
        room = float(memory.kv_tokens(node.start, node.end, kv_context(service, phase)))
        if room < 1.0:
            raise InputError(
                f"{instance.id}/{node.id}: no KV cache fits beside its layers",
                field="plan",
                hint="plan again, or give the node fewer layers",
            )
        return self._apply_limits(
            *self.times.operators(model),
            room,
            phase,
            model.engine,
            sequences=instance.slots,
            guess=self.times.guesses(model),
            ranks=model.engine.spread(spec, kind.count, node.tp) or 1,
        )

    def _build_measured(self, instance: Instance, index: int, profile: NodeProfile) -> UnitRow:
        node = instance.nodes[index]
        held = node.layers
        if held > profile.max_layers:
            raise InputError(
                f"{instance.id}/{node.id} holds {held} layers, at most {profile.max_layers} fit",
                field="plan",
                hint="plan again",
            )
        kind, row = self.times.curves(profile, self._options.handover_s)
        sequences, prompts = profile.decode_sequences, profile.prefill_requests
        return self._apply_limits(
            kind,
            row,
            profile.kv_tokens[held - 1],
            instance.phase,
            self._problem.run_by(instance.engine)
            .engine_of(self._problem.service(instance.service))
            .on(None),
            sequences=None if sequences is None else sequences[held - 1],
            prompts=None if prompts is None else prompts[held - 1],
        )

    def _apply_limits(
        self,
        kind: int,
        row: int,
        room: float,
        phase: Phase,
        profile: EngineProfile,
        *,
        sequences: int | None = None,
        prompts: int | None = None,
        guess: int = -1,
        ranks: int = 1,
    ) -> UnitRow:
        engine = self._options.batching == "engine"
        budget = self._options.token_budget
        if not engine:
            budget = NO_LIMIT
        elif budget is None:
            budget = profile.max_tokens if phase is Phase.PREFILL else profile.mixed_tokens
        asked = engine and is_asked_in_turn(profile.name, phase)
        return UnitRow(
            kind=kind,
            row=row,
            room=room,
            max_sequences=self._max_sequences(sequences, profile),
            max_prompts=PROMPTS_IN_STEP if prompts is None else min(prompts, PROMPTS_IN_STEP),
            budget=budget,
            chunked=engine,
            ahead=engine and profile.schedules_ahead,
            prompts_first=engine and profile.prompts_first,
            interval=profile.prompt_interval if engine else 1,
            collects=profile.collects_prompts,
            front_s=profile.request_s if asked else 0.0,
            stream_s=profile.stream_s if asked else 0.0,
            tokenize_s=profile.tokenize_s if asked else 0.0,
            rows=profile.rows if guess >= 0 else 1,
            guess=guess,
            ranks=ranks,
        )

    def _max_sequences(self, measured: int | None, profile: EngineProfile) -> int:
        """Sequences that run at a time: asked for, measured, or the engine's own limit."""
        if self._options.max_sequences is not None:
            return self._options.max_sequences
        return profile.max_sequences if measured is None else measured
