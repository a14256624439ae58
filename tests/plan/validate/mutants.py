"""Kinds of broken plans: each is a valid plan with one thing changed, and the rule and field that say so.

Plans of six families (rented nodes, executors, choices between models, clusters, engines, a limit on spot)
are broken where they differ, and all of them in what every plan states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from atoll.plan.choice import ModelMix
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.kept_groups import KeptGroup
from atoll.plan.plan import Flow, KeptPromise, Plan, Route
from atoll.plan.problem import Problem
from atoll.plan.request_groups import list_groups
from atoll.solve.registry import solve
from tests.plan import builders, clusters
from tests.plan.builders import CHOSEN, EAST, WEST, edit, edit_node, find, plan_of, rent
from tests.plan.validate.test_validate_executors import BROKEN, apart
from tests.solve.rent.test_choosing_plans import fleet as choosing_fleet


class Mutant(NamedTuple):
    """A change to a plan, the rule that must say so, and how the field that it names begins."""

    change: Callable[[Plan], Plan]
    rule: str
    field: str = ""


def stated(made: Plan, asked: Problem) -> Plan:
    """The plan with all that may be stated of it: models, weights, promises, bounds."""
    settled = asked.settled(made.mixes)
    models = {service.name: service.model for service in settled.services}
    promises = tuple(
        KeptPromise(
            service=service.name,
            target=service.attainment,
            kept=0.97,
            low=0.96,
            high=0.98,
            kept_ttft=0.98,
            kept_tpot=0.99,
            groups=tuple(
                KeptGroup(
                    name=group.name,
                    target=group.target,
                    requests=1000,
                    kept=0.97,
                    low=0.96,
                    high=0.98,
                    each={"ttft": 0.98, "tpot": 0.99},
                )
                for group in list_groups(service)
            ),
        )
        for service in settled.services
    )
    update = {
        "models": models,
        "checkpoints": settled.checkpoints(),
        "promises": promises,
        "capacity_bound": made.bound,
    }
    return made.model_copy(update=update)


def changed(**update: object) -> Callable[[Plan], Plan]:
    return lambda plan: plan.model_copy(update=update)


def promised(**update: object) -> Callable[[Plan], Plan]:
    """The first promise with other shares."""

    def change(plan: Plan) -> Plan:
        first, *rest = plan.promises
        return plan.model_copy(update={"promises": (first.model_copy(update=update), *rest)})

    return change


def lower_target(plan: Plan) -> Plan:
    """The first promise for slightly fewer requests than the fleet asks for."""
    return promised(target=plan.promises[0].target - 1e-4)(plan)


def grouped(**update: object) -> Callable[[Plan], Plan]:
    """The first group of requests of the first promise with other shares."""

    def change(plan: Plan) -> Plan:
        first, *rest = plan.promises[0].groups
        return promised(groups=(first.model_copy(update=update), *rest))(plan)

    return change


GROUPED: dict[str, Mutant] = {
    "a class left out": Mutant(
        lambda p: promised(groups=p.promises[0].groups[1:])(p), "promise", "promises.groups"
    ),
    "a class twice": Mutant(
        lambda p: promised(groups=(*p.promises[0].groups, p.promises[0].groups[0]))(p),
        "promise",
        "promises.groups",
    ),
    "a class that nobody asks for": Mutant(
        grouped(name="audio"), "promise", "promises.groups.name"
    ),
    "a class with a lower target": Mutant(grouped(target=0.9), "promise", "promises.groups.target"),
    "a class with an interval upside down": Mutant(
        grouped(low=0.98, high=0.96), "promise", "promises.groups.low"
    ),
    "a class that keeps all more often than one": Mutant(
        grouped(each={"ttft": 0.5}), "promise", "promises.groups.kept"
    ),
    "a class without requests": Mutant(grouped(requests=0), "promise", "promises.groups.requests"),
    "classes that keep more than all requests": Mutant(
        grouped(kept=1.0, high=1.0, each={}), "promise", "promises.groups.kept"
    ),
}
"""Of plans whose services have classes of requests."""


def launched(**update: object) -> Callable[[Plan], Plan]:
    """The engines of the first service started with other limits."""

    def change(plan: Plan) -> Plan:
        name = min(plan.engines)
        own = plan.engines[name].model_copy(update=update)
        return plan.model_copy(update={"engines": plan.engines | {name: own}})

    return change


def less(field: str) -> Callable[[Plan], Plan]:
    """The plan without the first entry of a field."""

    def change(plan: Plan) -> Plan:
        return plan.model_copy(update={field: dict(sorted(getattr(plan, field).items())[1:])})

    return change


def more(field: str) -> Callable[[Plan], Plan]:
    """The plan with one entry more, of a service that nobody asked for."""

    def change(plan: Plan) -> Plan:
        entries = getattr(plan, field)
        return plan.model_copy(update={field: entries | {"nobody": entries[min(entries)]}})

    return change


def better_bound(plan: Plan) -> Plan:
    """A bound by capacity that the plan itself breaks."""
    assert plan.objective is not None
    factor = 1.01 if plan.goal == "cost" else 0.99
    return plan.model_copy(update={"capacity_bound": plan.objective * factor})


def other_weights(plan: Plan) -> Plan:
    name = min(plan.checkpoints)
    other = replace(plan.checkpoints[name], repository="somebody/another-model")
    return plan.model_copy(update={"checkpoints": plan.checkpoints | {name: other}})


def other_model(plan: Plan) -> Plan:
    return plan.model_copy(update={"models": plan.models | {min(plan.models): "qwen3-14b"}})


def strange_promise(plan: Plan) -> Plan:
    first = plan.promises[0].model_copy(update={"service": "nobody"})
    return plan.model_copy(update={"promises": (*plan.promises, first)})


EVERY: dict[str, Mutant] = {
    "another model": Mutant(other_model, "model", "models."),
    "no model": Mutant(
        lambda p: p.model_copy(update={"models": {"nobody": "llama-3.1-8b"}}), "model", "models."
    ),
    "models of a stranger": Mutant(more("models"), "name", "models.nobody"),
    "engines of a stranger": Mutant(more("engines"), "name", "engines.nobody"),
    "engines with other memory": Mutant(launched(gpu_memory_utilization=0.5), "engine", "engines."),
    "engines with another KV cache": Mutant(launched(kv_cache_dtype="fp8"), "engine", "engines."),
    "engines with another promise": Mutant(launched(promised_ttft_s=99.0), "engine", "engines."),
    "engines with fewer sequences": Mutant(launched(max_num_seqs=3), "engine", "engines."),
    "engines with another loader": Mutant(launched(load_format="dummy"), "engine", "engines."),
    "engines scheduled otherwise": Mutant(launched(scheduling="sync"), "engine", "engines."),
    "a lower target": Mutant(promised(target=0.5), "promise", "promises.target"),
    "a slightly lower target": Mutant(lower_target, "promise", "promises.target"),
    "an interval upside down": Mutant(promised(low=0.98, high=0.96), "promise", "promises.low"),
    "a share above its interval": Mutant(
        promised(kept=0.975, low=0.96, high=0.97), "promise", "promises.low"
    ),
    "a share below its interval": Mutant(promised(kept=0.95), "promise", "promises.low"),
    "both kept more often than one": Mutant(promised(kept_tpot=0.9), "promise", "promises.kept"),
    "a promise of a stranger": Mutant(strange_promise, "name", "promises.nobody"),
    "a promise twice": Mutant(
        lambda p: p.model_copy(update={"promises": (*p.promises, p.promises[0])}), "promise"
    ),
    "a bound by capacity that is broken": Mutant(better_bound, "bound", "capacity_bound"),
    "no share served": Mutant(less("served_fraction"), "served", "served_fraction."),
    "no shares served": Mutant(changed(served_fraction={}), "served", "served_fraction."),
    "a share of a stranger": Mutant(more("served_fraction"), "name", "served_fraction.nobody"),
    "a bound that is broken": Mutant(
        lambda p: better_bound(p).model_copy(
            update={"bound": better_bound(p).capacity_bound, "gap": 0.0}
        ),
        "bound",
        "bound",
    ),
    "another gap": Mutant(changed(gap=0.4), "bound", "gap"),
    "a gap without a bound": Mutant(changed(bound=None, gap=0.0), "bound"),
    "no objective": Mutant(changed(objective=None), "cost"),
    "another objective": Mutant(changed(objective=0.001, bound=None, gap=None), "cost"),
    "another price": Mutant(lambda p: changed(usd_per_hour=p.usd_per_hour + 1.0)(p), "cost"),
    "a start that costs": Mutant(lambda p: changed(init_usd=p.init_usd + 1.0)(p), "cost"),
    "infeasible with instances": Mutant(changed(status="infeasible"), "demand"),
    "partial though all is served": Mutant(changed(status="partial"), "status"),
    "another goal": Mutant(
        lambda p: changed(goal="max-flow" if p.goal == "cost" else "cost")(p), "goal"
    ),
    "another problem": Mutant(changed(problem_hash="0" * 64), "problem", "problem_hash"),
    "an id twice": Mutant(
        lambda p: p.model_copy(update={"instances": (*p.instances, p.instances[0])}), "name"
    ),
    "nothing stands": Mutant(changed(instances=(), usd_per_hour=0.0, init_usd=0.0), "route"),
}
"""Kinds for plans of every family."""

PIPELINE, WHOLE = "chat-prefill-0", "chat-decode-0"


def with_flow(plan: Plan, flow: Flow) -> Plan:
    return edit(plan, PIPELINE, flows=(*find(plan, PIPELINE).flows, flow))


def faster(plan: Plan, name: str, factor: float) -> Plan:
    own = find(plan, name)
    flows = tuple(f.model_copy(update={"per_s": f.per_s * factor}) for f in own.flows)
    return edit(plan, name, flows=flows, throughput_per_s=own.throughput_per_s * factor)


def rerouted(plan: Plan, *ways: tuple[tuple[str, ...], float]) -> Plan:
    others = [route for route in plan.routes if route.service != "chat"]
    own = [Route(service="chat", instances=way, share=share) for way, share in ways]
    return plan.model_copy(update={"routes": (*others, *own)})


PAIR = (PIPELINE, WHOLE)

RENTED: dict[str, Mutant] = {
    "a gap in the layers": Mutant(lambda p: edit_node(p, PIPELINE, "n2", start=20), "layers"),
    "layers twice": Mutant(lambda p: edit_node(p, PIPELINE, "n2", start=8), "layers"),
    "no last layers": Mutant(lambda p: edit_node(p, PIPELINE, "n2", end=30), "layers"),
    "no first layers": Mutant(lambda p: edit_node(p, PIPELINE, "n0", start=1), "layers"),
    "too many layers": Mutant(lambda p: edit_node(p, WHOLE, "n0", end=40), "layers"),
    "layers backwards": Mutant(lambda p: edit_node(p, PIPELINE, "n2", start=32, end=14), "layers"),
    "a way that leaves early": Mutant(
        lambda p: with_flow(p, Flow(src="n0", dst="sink", per_s=0)), "layers"
    ),
    "more hops than stages": Mutant(lambda p: edit(p, PIPELINE, stages=1), "hops"),
    "a GPU too small": Mutant(lambda p: edit_node(p, WHOLE, "n0", node_type="T4:1"), "memory"),
    "GPUs that are not there": Mutant(lambda p: edit_node(p, WHOLE, "n0", tp=2), "memory"),
    "more than its nodes carry": Mutant(lambda p: faster(p, WHOLE, 1.1), "node-capacity"),
    "more than it carries": Mutant(lambda p: edit(p, WHOLE, throughput_per_s=1e9), "throughput"),
    "less than enters leaves": Mutant(
        lambda p: builders.edit_flow(p, PIPELINE, 0, per_s=1.0), "flow"
    ),
    "a flow to nowhere": Mutant(
        lambda p: with_flow(p, Flow(src="source", dst="n9", per_s=1)), "graph"
    ),
    "a flow past all": Mutant(
        lambda p: with_flow(p, Flow(src="source", dst="sink", per_s=1)), "graph"
    ),
    "a flow twice": Mutant(lambda p: with_flow(p, Flow(src="source", dst="n0", per_s=0)), "graph"),
    "a circle": Mutant(lambda p: with_flow(p, Flow(src="n2", dst="n0", per_s=0)), "graph"),
    "a node twice": Mutant(lambda p: edit_node(p, PIPELINE, "n1", id="n0"), "graph"),
    "an unknown service": Mutant(
        lambda p: edit(p, WHOLE, service="nobody", role="nobody/llm/decode"), "name"
    ),
    "another's service": Mutant(lambda p: edit(p, WHOLE, service="mini"), "name"),
    "another role": Mutant(lambda p: edit(p, WHOLE, role="chat/llm/both"), "name"),
    "an unknown region": Mutant(lambda p: edit(p, WHOLE, region="nowhere"), "name"),
    "an unknown node type": Mutant(lambda p: edit_node(p, WHOLE, "n0", node_type="L41:1"), "name"),
    "another region": Mutant(lambda p: edit(p, "chat-decode-1", region=EAST), "offer"),
    "a node elsewhere": Mutant(lambda p: edit_node(p, WHOLE, "n0", region=WEST), "region"),
    "another market": Mutant(lambda p: edit_node(p, "mini-both-0", "n0", market="spot"), "offer"),
    "more machines than there are": Mutant(
        lambda p: p.model_copy(
            update={
                "instances": (
                    *p.instances,
                    *(find(p, WHOLE).model_copy(update={"id": f"copy-{n}"}) for n in range(4)),
                )
            }
        ),
        "availability",
    ),
    "a slot without GPUs": Mutant(lambda p: edit_node(p, WHOLE, "n0", slot=0), "slice"),
    "GPUs without a slot": Mutant(lambda p: edit_node(p, WHOLE, "n0", gpu_ids=(0,)), "slice"),
    "a machine of no cluster": Mutant(lambda p: edit_node(p, WHOLE, "n0", host="a"), "host"),
    "kept that does not run": Mutant(lambda p: edit(p, WHOLE, kept=True), "kept"),
    "an instance less": Mutant(
        lambda p: p.model_copy(
            update={"instances": tuple(i for i in p.instances if i.id != "mini-both-0")}
        ),
        "demand",
    ),
    "a share not served": Mutant(changed(served_fraction={"chat": 0.7, "mini": 1.0}), "served"),
    "an instance's price": Mutant(lambda p: edit(p, WHOLE, usd_per_hour=0.1), "cost"),
    "routes below 1": Mutant(lambda p: rerouted(p, (PAIR, 0.9)), "route"),
    "routes above 1": Mutant(lambda p: rerouted(p, (PAIR, 0.9), (PAIR[::-1], 0.9)), "route"),
    "a route to nobody": Mutant(lambda p: rerouted(p, ((PIPELINE, "nobody"), 1.0)), "route"),
    "a route backwards": Mutant(lambda p: rerouted(p, (PAIR[::-1], 1.0)), "route"),
    "half a route": Mutant(lambda p: rerouted(p, ((PIPELINE,), 1.0)), "route"),
    "no route": Mutant(rerouted, "route"),
    "a route too far": Mutant(
        lambda p: rerouted(p, ((PIPELINE, "chat-decode-1"), 1.0)), "handover"
    ),
    "weights of another model": Mutant(other_weights, "model", "checkpoints."),
    "weights of a stranger": Mutant(more("checkpoints"), "name", "checkpoints.nobody"),
    "no promise of a service": Mutant(
        lambda p: p.model_copy(update={"promises": p.promises[1:]}), "promise", "promises"
    ),
    "engines of one service left out": Mutant(less("engines"), "engine", "engines."),
    "engines with another longest request": Mutant(
        launched(max_model_len=64), "engine", "engines."
    ),
    "engines that parse tools otherwise": Mutant(
        launched(tool_parser="hermes"), "engine", "engines."
    ),
}

CLUSTER: dict[str, Mutant] = {
    "an unknown machine": Mutant(lambda p: edit_node(p, "chat-both-0", "n1", host="z"), "host"),
    "no machine": Mutant(lambda p: edit_node(p, "chat-both-0", "n1", host=None), "host"),
    "a machine twice": Mutant(lambda p: edit_node(p, "chat-both-0", "n2", host="d"), "host"),
    "a machine of another kind": Mutant(
        lambda p: edit_node(p, "chat-both-0", "n1", node_type="L40S:1"), "host"
    ),
    "a machine elsewhere": Mutant(lambda p: edit_node(p, "chat-both-0", "n1", region=None), "host"),
    "GPUs that it has not": Mutant(lambda p: edit_node(p, "chat-both-0", "n1", tp=2), "memory"),
    "layers twice": Mutant(lambda p: edit_node(p, "chat-both-0", "n0", end=9), "layers"),
    "more than it carries": Mutant(lambda p: faster(p, "chat-both-0", 1.2), "node-capacity"),
    "more than is carried": Mutant(changed(objective=1450.0), "cost"),
    "another market": Mutant(lambda p: edit_node(p, "chat-both-0", "n1", market="spot"), "offer"),
    "for cost": Mutant(changed(goal="cost", objective=0.0, bound=0.0, gap=0.0), "goal"),
}


def mixed(**update: object) -> Callable[[Plan], Plan]:
    """The first mix with other values."""

    def change(plan: Plan) -> Plan:
        first, *rest = plan.mixes
        return plan.model_copy(update={"mixes": (first.model_copy(update=update), *rest)})

    return change


def shares_of(plan: Plan, *shares: float) -> dict[str, float]:
    return dict(zip(sorted(plan.mixes[0].shares), shares, strict=True))


CHOICE: dict[str, Mutant] = {
    "no mix": Mutant(changed(mixes=()), "mix", "mixes"),
    "a mix twice": Mutant(
        lambda p: p.model_copy(update={"mixes": (*p.mixes, *p.mixes)}), "mix", "mixes"
    ),
    "a mix of a stranger": Mutant(mixed(name="talk"), "mix", "mixes"),
    "shares below 1": Mutant(lambda p: mixed(shares=shares_of(p, 0.4, 0.5))(p), "mix", "mixes"),
    "a share of a stranger": Mutant(mixed(shares={"mail": 1.0}), "mix", "mixes"),
    "models swapped": Mutant(
        lambda p: mixed(
            models=dict(
                zip(
                    sorted(p.mixes[0].models),
                    reversed([m for _, m in sorted(p.mixes[0].models.items())]),
                    strict=True,
                )
            )
        )(p),
        "mix",
        "mixes",
    ),
    "an error too small": Mutant(mixed(error=0.001), "error", "mixes.error"),
    "another error allowed": Mutant(mixed(max_error=0.5), "error", "mixes.error"),
    "no error allowed": Mutant(mixed(max_error=None), "error", "mixes.error"),
    "more errors than allowed": Mutant(
        lambda p: mixed(shares=shares_of(p, 1.0, 0.0), error=0.06)(p), "error", "mixes.error"
    ),
    "sticky": Mutant(mixed(sticky=True), "mix", "mixes"),
    "other shares": Mutant(lambda p: mixed(shares=shares_of(p, 0.1, 0.9))(p), "error"),
}

ENGINE_FLEET = """
name: engines
services:
  chat:
    {model: llama-3.1-8b, ttft: 2s, tpot: 80ms, rate: 4/s, lengths: 512x128, phases: together,
     engine: {max_num_seqs: 64, max_num_batched_tokens: 2048, gpu_memory_utilization: 85%}}
  code: {model: qwen3-8b@q4_k_m, ttft: 5s, tpot: 200ms, rate: 0.02/s, lengths: 512x256, only: [M3-Max-36]}
pool:
  owned: {here: {"M3-Max-36:1": 1}}
  offers: [{region: here, node_type: "L40S:1", available: 4, usd_per_hour: 1.9}]
settings: {engines: [vllm, llamacpp]}
"""


def of_engine(name: str, **update: object) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        own = next(i for i in plan.instances if i.engine == name)
        return edit(plan, own.id, **update)

    return change


ENGINE: dict[str, Mutant] = {
    "no engine": Mutant(of_engine("vllm", engine=None), "engine", "instances.engine"),
    "an unknown engine": Mutant(of_engine("vllm", engine="tgi"), "engine", "instances.engine"),
    "an engine that is not allowed": Mutant(of_engine("vllm", engine="sglang"), "engine"),
    "an engine that cannot": Mutant(of_engine("llamacpp", engine="vllm"), "engine"),
    "an engine without its weights": Mutant(of_engine("vllm", engine="llamacpp"), "engine"),
    "too many slots": Mutant(of_engine("llamacpp", slots=999), "engine"),
    "no slots": Mutant(of_engine("llamacpp", slots=None), "engine"),
    "slots of an engine without": Mutant(of_engine("vllm", slots=4), "engine"),
    "KV cache of a whole GPU": Mutant(
        lambda p: edit_node(
            p, next(i.id for i in p.instances if i.engine == "vllm"), "n0", kv_bytes=1
        ),
        "memory",
    ),
    "no engines": Mutant(changed(engines={}), "engine", "engines.chat"),
    "engines with more tokens in a step": Mutant(
        launched(max_num_batched_tokens=8192), "engine", "engines.chat.max_num_batched_tokens"
    ),
    "engines with the tokens left open": Mutant(
        launched(max_num_batched_tokens=None), "engine", "engines.chat.max_num_batched_tokens"
    ),
    "engines with more sequences": Mutant(
        launched(max_num_seqs=256), "engine", "engines.chat.max_num_seqs"
    ),
    "engines with memory left open": Mutant(
        launched(gpu_memory_utilization=None), "engine", "engines.chat.gpu_memory_utilization"
    ),
}


def spot() -> tuple[Problem, Plan]:
    """A service that serves one pair of regions on spot, where as much as that may be."""
    asked = builders.problem(limits={"spot_share": 0.2}, settings={"init_penalty": 0.0})
    half = replace(CHOSEN[1], rented=rent("spot", L40S=1))
    made = plan_of(asked, CHOSEN[0], half, *CHOSEN[2:])
    return asked, made.model_copy(update={"bound": made.objective, "gap": 0.0, "status": "optimal"})


def idle_twin(plan: Plan) -> Plan:
    """One machine more that serves nobody, and is paid for."""
    twin = find(plan, "mini-both-0").model_copy(update={"id": "mini-both-1"})
    usd = plan.usd_per_hour + twin.usd_per_hour
    update = {"usd_per_hour": usd, "objective": usd, "bound": usd, "capacity_bound": None}
    return plan.model_copy(update={"instances": (*plan.instances, twin), **update})


EAST_PAIR, WEST_PAIR = ("chat-prefill-0", "chat-decode-0"), ("chat-prefill-1", "chat-decode-1")

SPOT: dict[str, Mutant] = {
    "more on spot": Mutant(
        lambda p: rerouted(p, (EAST_PAIR, 0.3), (WEST_PAIR, 0.7)), "spot-share", "routes"
    ),
    "all on spot": Mutant(lambda p: rerouted(p, (EAST_PAIR, 1.0)), "spot-share", "routes"),
    "more of it on spot than it says": Mutant(
        lambda p: edit_node(p, "chat-decode-1", "n0", market="spot"), "spot-share", "routes"
    ),
    "a machine for nobody": Mutant(idle_twin, "route", "routes"),
}


EXECUTORS: dict[str, Mutant] = GROUPED | {
    name: Mutant(change, min(found)) for name, (change, found) in sorted(BROKEN.items())
}

OWN: dict[str, dict[str, Mutant]] = {
    "rented": RENTED,
    "executors": EXECUTORS,
    "choice": CHOICE,
    "cluster": CLUSTER,
    "engines": ENGINE,
    "spot": SPOT,
}
"""By family of plans the kinds of mutants that are its own."""


@cache
def families() -> dict[str, tuple[Problem, Plan]]:
    """A valid plan of every family."""
    rented, by_hand = builders.small()
    choosing = choosing_fleet(max_error=0.05)
    mix = ModelMix.of(choosing.choices[0], dict.fromkeys(choosing.variants["chat"], 0.5))
    chosen = solve(choosing.settled([mix])).model_copy(update={"mixes": (mix,)})
    engines = parse_fleet(ENGINE_FLEET)
    found = {
        "rented": (rented, by_hand),
        "executors": apart(),
        "choice": (choosing, chosen),
        "cluster": (clusters.problem(), clusters.plan()),
        "engines": (engines, solve(engines)),
        "spot": spot(),
    }
    return {name: (asked, stated(made, asked)) for name, (asked, made) in found.items()}
