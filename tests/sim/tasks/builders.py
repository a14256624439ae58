"""Small fleets of executors for the simulator of tasks."""

from __future__ import annotations

import numpy as np

from atoll.sim.tasks.task_fleet import (
    Amount,
    BatchPart,
    Box,
    BoxLink,
    ClassSpec,
    DiffusionPart,
    Emits,
    ExecutorSpec,
    PartEdge,
    PartModel,
    PartNeed,
    PathSpec,
    Promises,
    StepSpec,
    StepTable,
    TaskFleet,
    TokenPart,
)

TABLE = StepTable(
    prefill=((1.0, 0.004), (512.0, 0.03), (4096.0, 0.26)),
    decode=((1.0, 0.01), (64.0, 0.016), (256.0, 0.04)),
    step_s=0.001,
)


def path(klass: str, *steps: tuple[str, str], share: float = 1.0) -> PathSpec:
    """Return a path of service "s": (parts joined by "+", executors joined by "+") step by step."""
    made = tuple(
        StepSpec(tuple(parts.split("+")), tuple((name, 1.0) for name in executors.split("+")))
        for parts, executors in steps
    )
    return PathSpec("s", klass, share, made)


def executor(name: str, box: str = "box", **parts: PartModel) -> ExecutorSpec:
    """Return an executor of service "s"; "__" in the name of a part stands for "."."""
    return ExecutorSpec(
        name, box, "s", {part.replace("__", "."): model for part, model in parts.items()}
    )


_CHAINS = {
    "text": ("llm",),
    "image": ("eye", "llm"),
    "both": ("eye", "ear", "llm"),
    "speech": ("ear", "llm", "talker", "vocoder"),
    "picture": ("llm", "dit", "vae"),
}
_FEEDS = (
    ("eye", "llm"),
    ("ear", "llm"),
    ("eye", "llm.prefill"),
    ("ear", "llm.prefill"),
    ("llm.prefill", "llm.decode"),
    ("llm", "talker"),
    ("llm.decode", "talker"),
    ("talker", "vocoder"),
    ("llm", "dit"),
    ("llm.decode", "dit"),
    ("dit", "vae"),
)


def random_fleet(seed: int) -> TaskFleet:
    """Return a fleet of up to six executors with all kinds of part, some shared, some apart."""
    rng = np.random.default_rng(seed)
    names = [name for name in _CHAINS if rng.random() < 0.6] or ["speech"]
    apart = bool(rng.random() < 0.4)
    boxes = tuple(
        Box(
            f"b{i}",
            nic_bytes_per_s=float(rng.choice([np.inf, 50.0, 500.0])),
            latency_s=float(rng.choice([0.0, 0.003])),
            inner_bytes_per_s=float(rng.choice([np.inf, 3000.0])),
            inner_latency_s=float(rng.choice([0.0, 0.0007])),
        )
        for i in range(2)
    )
    llms = ("llm", "llm.prefill", "llm.decode") if apart else ("llm",)
    wanted = [p for chain in (_CHAINS[n] for n in names) for p in chain]
    parts = [*dict.fromkeys(p for p in wanted if p != "llm"), *llms]
    held: list[list[str]] = [[] for _ in range(int(rng.integers(1, 7)))]
    for part in parts:
        for at in rng.choice(len(held), size=int(rng.integers(1, len(held) + 1)), replace=False):
            held[at].append(part)
    executors = tuple(
        ExecutorSpec(
            f"e{i}",
            f"b{rng.integers(2)}",
            "s",
            {part: _random_part(rng, part, names) for part in rng.permutation(own)},
            group=(None, 0, 1, 0)[(seed + i) % 4],
        )
        for i, own in enumerate(held)
        if own
    )
    classes = tuple(_random_class(rng, name, llms) for name in names)
    paths = [p for name in names for p in _random_paths(rng, name, apart, executors)]
    links = {("b0", "b1"): BoxLink(80.0, 0.002), ("b1", "b0"): BoxLink(400.0)}
    return TaskFleet(executors, classes, tuple(paths), boxes, links if seed % 3 == 0 else {})


def _random_part(rng: np.random.Generator, part: str, names: list[str]) -> PartModel:
    item_s = {name: float(rng.uniform(0.01, 0.2)) for name in names}
    if part in ("eye", "ear", "vocoder", "vae"):
        made: dict[str, Emits] = {"vocoder": "audio", "vae": "image"}
        emits = made.get(part, "")
        return BatchPart(
            item_s, float(rng.choice([0.0, rng.uniform(0.0, 0.1)])), int(rng.integers(1, 5)), emits
        )
    if part == "dit":
        return DiffusionPart(item_s, float(rng.uniform(0.0, 0.05)), int(rng.integers(1, 4)))
    table = StepTable(
        prefill=((1.0, float(rng.uniform(0.001, 0.01))), (64.0, float(rng.uniform(0.02, 0.05)))),
        decode=((1.0, float(rng.uniform(0.001, 0.01))), (8.0, float(rng.uniform(0.011, 0.02)))),
        step_s=float(rng.uniform(0.0, 0.002)),
        shared_s=0.0005,
    )
    return TokenPart(
        table,
        kv_tokens=int(rng.integers(60, 400)),
        max_sequences=int(rng.integers(1, 9)),
        max_tokens=int(rng.integers(1, 60)),
        phase={"llm.prefill": "prefill", "llm.decode": "decode"}.get(part, "both"),  # type: ignore[arg-type]
        emits="" if part == "talker" else "text",
        admission="prompts" if rng.random() < 0.5 else "booked",
    )


def _random_class(rng: np.random.Generator, name: str, llms: tuple[str, ...]) -> ClassSpec:
    needs: dict[str, PartNeed] = {}
    for part in (*(p for p in _CHAINS[name] if p != "llm"), *llms):
        if part == "talker":
            needs[part] = PartNeed(
                prompt=Amount(fixed=2.0, per_output=1.0), answer=Amount(per_output=1.7)
            )
        elif part in llms:
            needs[part] = PartNeed(prompt=Amount(fixed=3.0, per_input=1.0))
        else:
            needs[part] = PartNeed(
                items=float(rng.choice([1.0, 2.0, 0.5, 3.2])), steps=int(rng.integers(1, 6))
            )
    edges: list[PartEdge] = []
    for src, dst in _FEEDS:
        if src not in needs or dst not in needs:
            continue
        streamed, chunk = False, 0
        if dst in ("vocoder", "talker") and rng.random() < 0.7:
            streamed, chunk = bool(rng.random() < 0.7), int(rng.integers(1, 20))
        # One chunked edge into each part.
        if any(e.dst == dst and e.chunk_tokens for e in edges):
            streamed, chunk = False, 0
        size = Amount(fixed=float(rng.uniform(0.0, 9.0)), per_input=float(rng.choice([0.0, 0.2])))
        edges.append(PartEdge(src, dst, size, chunk, streamed))
    return ClassSpec(
        "s",
        name,
        float(rng.uniform(0.5, 6.0)),
        needs,
        tuple(edges),
        Promises(ttft_s=0.5, tpot_s=0.02, ahead_s=0.1 if name == "speech" else None),
        input_tokens=float(rng.integers(1, 60)),
        output_tokens=float(rng.integers(1, 40)),
        input_cv=float(rng.choice([0.0, 0.6])),
        output_cv=float(rng.choice([0.0, 0.9])),
        speech=Amount(per_output=0.08),
    )


def _random_paths(
    rng: np.random.Generator, name: str, apart: bool, executors: tuple[ExecutorSpec, ...]
) -> list[PathSpec]:
    def weighed(part: str) -> tuple[tuple[str, float], ...]:
        return tuple(
            (e.name, float(rng.choice([1.0, 1.0, 2.5]))) for e in executors if part in e.parts
        )

    ways = [_CHAINS[name]]
    if apart:
        i = _CHAINS[name].index("llm")
        ways.append((*_CHAINS[name][:i], "llm.prefill", "llm.decode", *_CHAINS[name][i + 1 :]))
    found: list[PathSpec] = []
    for way in ways:
        steps = tuple(StepSpec((part,), weighed(part)) for part in way)
        found.append(PathSpec("s", name, float(rng.uniform(0.2, 1.0)), steps))
        # The first two parts together where somebody has both.
        both = tuple(
            (e.name, 1.0) for e in executors if way[0] in e.parts and way[1:2] and way[1] in e.parts
        )
        if both:
            joined = (StepSpec(way[:2], both), *steps[2:])
            found.append(PathSpec("s", name, float(rng.uniform(0.2, 1.0)), joined))
    return found
