"""Cornserve's workloads and measurements, and how the planner of any-to-any models is asked the same.

All on equal A100-80 in boxes of eight, without latency promises: the paper has none. Sizes of requests are
those of the scripts published with it: footnote 2 is an image of 800 x 600, 20 frames of 1024 x 768, 8 s of
sound, 1,000 tokens of text and 100 of answer. How long speech lasts is not said; 100 tokens are 75 words or
30 s.

The labels of figure 2 are taken from the published script that ran its four deployments
(`benchmark/profile_e2e_8a100.py` in cornserve-ai/cornserve), not from a copy of the paper, which names seven
of eight workloads and misreads some: an encoder of InternVL3 takes one tile after another, so that two of
them, where they bound 2E/3PD, carry the same tiles/s in every column, 28 to 29 with the script's labels.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from atoll.api.fleet import Fleet
from atoll.catalog import Catalog
from atoll.core.ids import parse_node_type
from atoll.plan.problem import Problem, Service
from atoll.solve.effort import Effort
from atoll.solve.graph.executor_options import Option, named_options, plain_parts
from atoll.solve.graph.executor_program import solve_program
from atoll.solve.graph.graph_build import BuiltProgram, build_program
from atoll.solve.graph.graph_types import ExecutorType, GraphAnswer, GraphProgram

OMNI, OMNI3, INTERNVL, QWEN_VL, QWEN_IMAGE = (
    "qwen2.5-omni-7b",
    "qwen3-omni-30b",
    "internvl3-38b",
    "qwen2.5-vl-32b",
    "qwen-image",
)
GAP = 1e-4
"""Proven gap at which a search for the most throughput may stop."""

IMAGE = {"count": 1, "size": "800x600"}
VIDEO = {"frames": 20, "size": "1024x768"}
AUDIO, SPEECH = "8s", "30s"
TEXT = {"input": 1000, "output": 100}

Entry = dict[str, object]
Classes = dict[str, Entry]
Deployment = Mapping[tuple[str, int], int]
"""How many executors there are of parts ("vision+llm") on so many GPUs each."""


@dataclass(frozen=True)
class Workload:
    """Images and text that every request brings: size in pixels, how many, tokens in and out.

    Of `images` below 1 that share of requests brings one, and the others bring text alone.
    """

    width: int
    height: int
    images: float
    prompt: int
    answer: int

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return f"{self.width}x{self.height}x{self.images:g} {self.prompt}/{self.answer}"

    def classes(self) -> Classes:
        """Its requests as classes."""
        text: Entry = {"input": self.prompt, "output": self.answer}
        share = min(1.0, self.images)
        images = {"count": max(1.0, self.images), "size": f"{self.width}x{self.height}"}
        found: Classes = {"image+text": {"share": share, "images": images, **text}}
        if share < 1.0:
            found["text"] = {"share": 1.0 - share, **text}
        return found


FIGURE2 = (
    Workload(1920, 1080, 1, 100, 100),
    Workload(1920, 1080, 1, 100, 300),
    Workload(1920, 1080, 1, 1000, 300),
    Workload(1680, 1050, 1, 1000, 300),
    Workload(1680, 1050, 1, 100, 300),
    Workload(1680, 1050, 1, 1000, 500),
    Workload(896, 896, 2, 1000, 300),
    Workload(896, 896, 1, 1000, 300),
)

MONOLITHS, E_PD, EP_D, E_P_D = "4 monoliths", "2E/3PD", "2EP/2D", "2E/1P/2D"
FIGURE2_DEPLOYMENTS: dict[str, Deployment] = {
    MONOLITHS: {("vision+llm", 2): 4},
    E_PD: {("vision", 1): 2, ("llm", 2): 3},
    EP_D: {("vision+llm.prefill", 2): 2, ("llm.decode", 2): 2},
    E_P_D: {("vision", 1): 2, ("llm.prefill", 2): 1, ("llm.decode", 2): 2},
}
FIGURE2_PAPER = {
    MONOLITHS: (4.4, 3.5, 2.8, 3.2, 4.4, 2.5, 2.4, 4.2),
    E_PD: (3.2, 3.2, 3.2, 3.8, 4.0, 2.6, 2.8, 4.3),
    EP_D: (2.0, 2.2, 2.1, 2.5, 2.6, 2.5, 1.5, 2.7),
    E_P_D: (2.4, 2.4, 1.8, 2.1, 3.0, 2.1, 1.6, 2.6),
}
"""Requests/s that the paper measured."""

TABLE3 = {
    "lower resolution": Workload(1680, 1050, 1.0, 1000, 300),
    "standard": Workload(1920, 1080, 1.0, 1000, 300),
    "less text": Workload(1920, 1080, 1.0, 100, 100),
    "fewer images": Workload(1920, 1080, 0.6, 100, 100),
}
TABLE3_DEPLOYMENTS: dict[str, Deployment] = {
    "monolith": {("vision+llm", 2): 8},
    "E/PD": {("vision", 1): 4, ("llm", 2): 6},
    "EP/D": {("vision+llm.prefill", 2): 4, ("llm.decode", 2): 4},
    "E/P/D": {("vision", 1): 2, ("llm.prefill", 2): 2, ("llm.decode", 2): 4},
}
"""Section 7.3.2's, on 16 GPUs; its E/P/D leaves two of them idle."""


OMNI_DEPLOYMENTS: dict[int, dict[str, Deployment]] = {
    boxes: {
        f"1 thinker, {8 * boxes - 1} talkers with vocoder": {
            ("vision+audio+llm", 1): 1,
            ("talker+vocoder", 1): 8 * boxes - 1,
        }
    }
    for boxes in (1, 2)
}
"""Section 7.2's plans of Qwen2.5-Omni, by boxes; encoders run beside the thinker."""
OMNI3_DEPLOYMENTS: dict[int, dict[str, Deployment]] = {
    1: {
        "1 thinker x2, 5 talkers, 1 vocoder": {
            ("vision+audio+llm", 2): 1,
            ("talker", 1): 5,
            ("code2wav", 1): 1,
        }
    },
    2: {
        "3 thinkers x2, 10 talkers with vocoder": {
            ("vision+audio+llm", 2): 3,
            ("talker+code2wav", 1): 10,
        }
    },
}
"""Figure 7's plans of Qwen3-Omni, by boxes; encoders run beside the thinker."""


def servegen(
    *, audio: bool = True, speech: float = 0.2, video: float = 0.5, sound: float = 0.5
) -> Classes:
    """Return footnote 6's requests: an image each, half with video, half with sound, a fifth answered aloud.

    Video and sound come independently of each other, as in the published script.
    """
    found: Classes = {}
    for sees, hears, speaks in itertools.product(
        (False, True), (False, True) if audio else (False,), (False, True) if speech else (False,)
    ):
        share = video if sees else 1.0 - video
        share *= (sound if hears else 1.0 - sound) if audio else 1.0
        share *= speech if speaks else 1.0 - speech
        brings = "+".join(["image", *["video"] * sees, *["audio"] * hears])
        entry: Entry = {"share": share, "images": IMAGE, **TEXT}
        if sees:
            entry["video"] = VIDEO
        if hears:
            entry["audio"] = AUDIO
        if speaks:
            entry["speech"] = SPEECH
        found[f"{brings} -> {'audio' if speaks else 'text'}"] = entry
    return found


def pictures(prompt: int) -> Classes:
    """Return section 7.3.3's requests: one image of 512 x 512 in 20 steps."""
    image = {"size": "512x512", "steps": 20}
    return {"text -> image": {"share": 1.0, "input": prompt, "image": image}}


def equal_gpus(model: str, classes: Classes, boxes: int, **service: object) -> Problem:
    """Return the problem of one request/s on boxes of eight A100-80 at 1 USD/h a GPU, without promises."""
    pool = {
        "region": "lab",
        "node_type": "A100-80:8",
        "market": "owned",
        "available": boxes,
        "usd_per_hour": "$8/h",
    }
    fleet: Entry = {
        "services": {"model": {"model": model, "rate": "1/s", "classes": classes, **service}},
        "pool": {"offers": [pool]},
    }
    return Fleet.from_dict(fleet).problem


@dataclass(frozen=True)
class Most:
    """The most that a problem's machines carry: requests/s, what is proven of it, and by what executors."""

    per_s: float
    bound_per_s: float
    executors: Mapping[tuple[str, int], int]

    @property
    def text(self) -> str:
        """The executors in words: 4 vision, 6 vision+llm x2."""
        return ", ".join(
            f"{count} {parts}" + (f" x{gpus}" if gpus > 1 else "")
            for (parts, gpus), count in sorted(self.executors.items())
        )


def build(problem: Problem, catalog: Catalog, cut: str | None = None) -> BuiltProgram:
    """Return the program of a problem: of all options, or of a way to deploy that has a name."""

    def choose(service: Service, routes: Sequence[Sequence[str]]) -> tuple[Option, ...]:
        assert cut is not None
        return named_options(cut, catalog.model(service.model), routes)

    return build_program(problem, catalog, Effort(), None, choose=None if cut is None else choose)


def carry_most(
    program: GraphProgram, keep: Callable[[ExecutorType], bool] = lambda _: True
) -> Most | None:
    """Return the most that the executors which `keep` allows carry; None where they carry nothing.

    Demand is one request/s, so that a multiple of it is requests/s.
    """
    kept = tuple(executor for executor in program.executors if keep(executor))
    answer = solve_program(replace(program, executors=kept, goal="most"), gap=GAP)
    if answer.status == "infeasible" or answer.objective <= 0.0:
        return None
    return Most(answer.objective, answer.bound, _count(answer, kept))


def _count(answer: GraphAnswer, executors: Sequence[ExecutorType]) -> dict[tuple[str, int], int]:
    found: Counter[tuple[str, int]] = Counter()
    for placed in answer.placed:
        found[key_of(executors[placed.executor])] += placed.count
    return dict(found)


def key_of(executor: ExecutorType) -> tuple[str, int]:
    """Return an executor's parts and how many GPUs it has."""
    ((kind, _),) = executor.uses
    return executor.label, parse_node_type(kind).gpu_count


def deployed(program: GraphProgram, deployment: Deployment) -> float:
    """Return requests/s of a fixed deployment in which every part has one kind of executor.

    Each kind carries what its executors have seconds for; the scarcest bounds all. 0 where one does not fit.
    """
    known = {key_of(executor): executor for executor in program.executors}
    rates = []
    for key, count in deployment.items():
        if key not in known:
            return 0.0
        executor = known[key]
        spent = 0.0
        for demand in program.classes:
            needed = {part for route in demand.routes for part in route}
            for part in executor.parts:
                if part not in needed:
                    continue
                if (*demand.key, part) not in executor.seconds:
                    return 0.0
                spent += demand.rate_per_s * executor.seconds[*demand.key, part]
        if spent > 0.0:
            rates.append(count / spent)
    return min(rates, default=0.0)


def cut_down(program: GraphProgram, gpus: int) -> GraphProgram:
    """Return the program on machines of fewer GPUs each, as cells of that many are."""
    machines = tuple(
        replace(
            m,
            gpus=gpus,
            usd_per_hour=m.usd_per_hour * gpus / m.gpus,
            sizes=tuple(size for size in m.sizes if size <= gpus),
        )
        for m in program.machines
    )
    return replace(program, machines=machines)


def one_at_a_time(
    program: GraphProgram, by_part: GraphProgram, parts: Sequence[str]
) -> GraphProgram:
    """Return the program with some parts serving one request after another, as long as each takes alone.

    `by_part` is the same problem's with all options: it says how long each part takes, where executors of
    `program` run several for a request as one.
    """
    known = {key_of(executor): executor for executor in by_part.executors}

    def slowed(executor: ExecutorType) -> ExecutorType:
        single = known[key_of(executor)]
        seconds = {
            (service, klass, label): sum(
                (single.latency_s if part in parts else single.seconds)[service, klass, part]
                for part in plain_parts(label)
            )
            for service, klass, label in executor.seconds
        }
        return replace(executor, seconds=seconds)

    return replace(program, executors=tuple(slowed(e) for e in program.executors))


def best(rates: Mapping[str, float]) -> str:
    """Return who carries most; the first of equals."""
    return max(rates, key=lambda name: rates[name])


def figure2_rates(workload: Workload, catalog: Catalog) -> dict[str, float]:
    """Return requests/s of figure 2's four deployments of InternVL3-38B on eight GPUs."""
    program = build(equal_gpus(INTERNVL, workload.classes(), 1), catalog).program
    return {name: deployed(program, layout) for name, layout in FIGURE2_DEPLOYMENTS.items()}


def figure2_winner(column: int) -> str:
    """Return who won a column of figure 2 in the paper."""
    return best({name: rates[column] for name, rates in FIGURE2_PAPER.items()})
