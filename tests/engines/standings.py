"""What is known of every engine, kind of plan and target: the tables of docs/engines.md, made from the code.

    python -m tests.engines.standings    writes them

An engine that does not run a plan, or a target that does not start it, is asked and refuses in its own words.
What they take is *written*; where a test runs the real engine so, or a record of a run on GPUs is kept, that
is named in `TESTED` and `SERVED`, and checked to be there.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from atoll.catalog.catalog import Catalog
from atoll.core.errors import AtollError, UsageError
from atoll.core.ids import parse_node_type
from atoll.deploy.commands.node_commands import (
    CommandSettings,
    InstanceRecipe,
    ServiceWeights,
    executor_command,
)
from atoll.deploy.commands.paste import format_line
from atoll.deploy.labels import Labels
from atoll.deploy.slurm.script import group_machines, write_script
from atoll.deploy.slurm.slurm_pool import GpuChoice
from atoll.deploy.slurm.slurm_settings import SlurmSettings
from atoll.deploy.target import Deployer, DeployError, StartOrder
from atoll.deploy.target_table import TARGETS, TargetSettings
from atoll.engines.engine import Engine, Standing
from atoll.engines.limits import EngineLaunch
from atoll.engines.table import list_planned
from atoll.engines.vllm_omni import ENGINE as OMNI
from atoll.engines.vllm_omni import STAGES
from atoll.plan.engine_layout import engine_layout, handover_of, list_limits
from atoll.plan.plan import SINK, SOURCE, Flow, Instance, Node
from atoll.runtime.task_fleet.parts import ServedParts
from tests.deploy.ray.builders import FakeRay, make_deployer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "engines.md"
BEGIN, END = "<!-- standings: begin -->", "<!-- standings: end -->"
REFUSED = "refused"
COMMANDS = "commands"
"""The column of commands alone, as `atoll plan --commands` prints them."""
COLUMNS = (COMMANDS, *TARGETS)
DENSE = "llama-3.1-8b"
LAYERS = 32
OMNI_PARSED = "tests/engines/test_own_parsers.py::test_vllm_omni_reads_the_stages_of_its_command"
EXECUTORS_TESTED = (
    "tests/e2e/test_operating_executors.py::test_executors_are_started_replaced_added_and_ended"
)
GPUS = ("V100-32", "T4", "A100-80", "L4", "H200", "B200", "MI250", "MI300X", "M3-Max-36")
"""One of each generation, for the table of number formats."""

Part = tuple[str, int, int, int]
"""A node: its type, its first layer, the one after its last, and its tensor parallel size."""


@dataclass(frozen=True, slots=True)
class PlanKind:
    """A kind of plan: the nodes of an instance, or of two for prefill and decode; what they serve."""

    title: str
    both: tuple[Part, ...] = ()
    prefill: tuple[Part, ...] = ()
    decode: tuple[Part, ...] = ()
    model: str = DENSE
    quantization: str | None = None
    """What the engine turns weights of 16 bits into as it loads them."""
    shared: bool = False
    """Nodes are slices of one machine."""

    def instances(self, engine: str) -> list[Instance]:
        """Return its instances, planned for an engine."""
        sides = {"both": self.both, "prefill": self.prefill, "decode": self.decode}
        return [self._instance(engine, phase, parts) for phase, parts in sides.items() if parts]

    def _instance(self, engine: str, phase: str, parts: Sequence[Part]) -> Instance:
        nodes = tuple(
            Node(
                id=f"n{at}",
                node_type=kind,
                market="on-demand",
                start=start,
                end=end,
                tp=tp,
                slot=0 if self.shared else None,
                gpu_ids=(at,) if self.shared else None,
            )
            for at, (kind, start, end, tp) in enumerate(parts)
        )
        last = max(node.end for node in nodes)
        flows = [
            *((SOURCE, node.id) for node in nodes if node.start == 0),
            *((a.id, b.id) for a in nodes for b in nodes if a.start < b.start <= a.end < b.end),
            *((node.id, SINK) for node in nodes if node.end == last),
        ]
        return Instance(
            # As refusals name it, in a line of its own.
            id={"both": "it"}.get(phase, phase),
            service="chat",
            role=f"chat/llm/{phase}",
            region="aws/us-east-2",
            stages=len({node.start for node in nodes}),
            nodes=nodes,
            flows=tuple(Flow(src=a, dst=b, per_s=1.0) for a, b in flows),
            throughput_per_s=1.0,
            usd_per_hour=1.0,
            engine=engine,
        )


def _row(*kinds: str, cuts: Sequence[int] = (0, 20, LAYERS), tp: int = 1) -> tuple[Part, ...]:
    """Nodes in a row, cut at these layers."""
    return tuple((kind, a, b, tp) for kind, (a, b) in zip(kinds, pairwise(cuts), strict=True))


ONE: tuple[Part, ...] = (("H200:1", 0, LAYERS, 1),)
TWO: tuple[Part, ...] = (("H200:2", 0, LAYERS, 2),)
SHARE: tuple[Part, ...] = (("H200/2:2", 0, LAYERS, 1),)
LAYOUTS = (
    PlanKind("one GPU", ONE),
    PlanKind("tensor parallel on the GPUs of a machine", TWO),
    PlanKind("copies of the layers on the GPUs of a machine", (("H200:2", 0, LAYERS, 1),)),
    PlanKind("a pipeline on the GPUs of a machine", _row("H200:2", "H200:2"), shared=True),
    PlanKind("a pipeline over machines, uneven layers", _row("H200:1", "H200:1")),
    PlanKind("a pipeline over unlike GPUs", _row("L40S:1", "L4:1")),
    PlanKind(
        "a pipeline with unlike tensor parallel sizes",
        (("A10G:4", 0, 20, 4), ("L40S:1", 20, LAYERS, 1)),
    ),
    PlanKind("a pipeline of copies", _row("L4:2", "L4:2")),
    PlanKind(
        "several machines in a stage",
        (("L40S:1", 0, 16, 1), ("L4:1", 16, LAYERS, 1), ("L4:1", 16, LAYERS, 1)),
    ),
    PlanKind(
        "layer ranges that overlap",
        (("L40S:1", 0, 20, 1), ("L4:1", 20, 32, 1), ("L40S:1", 12, 32, 1)),
    ),
    PlanKind("prefill and decode apart", prefill=ONE, decode=ONE),
    PlanKind("apart, with unlike tensor parallel sizes", prefill=ONE, decode=TWO),
    PlanKind("apart, prefill a pipeline", prefill=_row("L4:1", "L4:1"), decode=ONE),
    PlanKind("apart, decode a pipeline", prefill=ONE, decode=_row("L4:1", "L4:1")),
    PlanKind("one of several on a GPU, by memory share", SHARE, shared=True),
    PlanKind("apart, on shares of a GPU", prefill=SHARE, decode=SHARE, shared=True),
    PlanKind("a pipeline over shares of a GPU", _row("H200/2:2", "H200/2:2"), shared=True),
)
MODELS = (
    PlanKind("a mixture of experts", ONE, model="qwen3-30b-a3b"),
    PlanKind("weights in fp8", ONE, model=f"{DENSE}@fp8"),
    PlanKind("weights made fp8 as they are loaded", ONE, model=f"{DENSE}@fp8", quantization="fp8"),
    PlanKind("weights in int8", ONE, model=f"{DENSE}@int8"),
    PlanKind("weights in int4 (AWQ, GPTQ)", ONE, model=f"{DENSE}@int4"),
    PlanKind("weights in mxfp4", ONE, model="gpt-oss-20b"),
    PlanKind("weights in nvfp4", ONE, model=f"{DENSE}@nvfp4"),
    PlanKind("weights in GGUF's q4_k_m", ONE, model=f"{DENSE}@q4_k_m"),
    PlanKind("KV cache in fp8", ONE, model=f"{DENSE}@kv=fp8"),
)
KINDS = (*LAYOUTS, *MODELS)

_UP = "tests/real/test_fleets.py::test_no_answer_is_lost_to_kills_drains_and_new_plans"
_EXACT = "tests/engine/test_exact.py::"
_MATRIX = "tests/engine/test_matrix.py::"
_STORED = f"{_MATRIX}test_answers_are_those_of_transformers_with_the_same_weights"
_SPLIT = "tests/engine/test_ranks.py::"
_LAYOUTS = f"{_EXACT}test_any_layout_is_exact"
_UNLIKE = "tests/deploy/local/test_local_stage.py::test_two_unlike_nodes_serve_drain_and_leave"
_HELPERS = (
    "tests/deploy/local/test_local_phases.py"
    "::test_prompts_are_computed_elsewhere_while_there_is_somebody"
)
_JOBS = (
    "tests/deploy/slurm/test_slurm_fleet.py::test_cancelled_jobs_are_replaced_while_streams_go_on"
)
_RANKS = (
    "tests/real/test_pipelines.py"
    "::test_pipelines_over_machines_answer_as_one_process_and_dead_ranks_are_replaced"
)
TESTED: Mapping[tuple[str, str, str], str] = {
    ("vllm", "one GPU", "local"): _UP,
    ("vllm", "a pipeline on the GPUs of a machine", COMMANDS): (
        "tests/real/test_pipelines.py::test_a_pipeline_on_one_machine_answers_as_one_process"
    ),
    ("vllm", "a pipeline over machines, uneven layers", "local"): _RANKS,
    ("vllm", "a pipeline over unlike GPUs", "local"): _RANKS,
    ("vllm", "prefill and decode apart", COMMANDS): (
        "tests/real/test_pairs.py::test_tokens_are_those_of_one_server"
    ),
    ("llamacpp", "one GPU", "local"): _UP,
    ("atoll", "one GPU", COMMANDS): _LAYOUTS,
    ("atoll", "one GPU", "local"): (
        "tests/e2e/test_operating.py::test_a_fleet_lives_grows_survives_its_controller_and_ends"
    ),
    ("atoll", "one GPU", "slurm"): (
        "tests/e2e/test_operating_slurm.py::test_a_plan_over_slurm_and_this_machine"
    ),
    ("atoll", "tensor parallel on the GPUs of a machine", COMMANDS): (
        "tests/engine/test_process.py::test_a_lost_rank_ends_its_node"
    ),
    ("atoll", "a pipeline with unlike tensor parallel sizes", COMMANDS): (
        f"{_SPLIT}test_any_layout_over_ranks_is_exact"
    ),
    ("atoll", "a pipeline with unlike tensor parallel sizes", "local"): _UNLIKE,
    ("atoll", "apart, with unlike tensor parallel sizes", COMMANDS): (
        f"{_SPLIT}test_kv_goes_between_unlike_ranks"
    ),
    ("atoll", "a pipeline on the GPUs of a machine", COMMANDS): _LAYOUTS,
    ("atoll", "a pipeline over machines, uneven layers", COMMANDS): _LAYOUTS,
    ("atoll", "a pipeline over machines, uneven layers", "local"): _UNLIKE,
    ("atoll", "a pipeline over unlike GPUs", COMMANDS): _LAYOUTS,
    ("atoll", "a pipeline over unlike GPUs", "local"): _UNLIKE,
    ("atoll", "a pipeline over unlike GPUs", "slurm"): _JOBS,
    ("atoll", "several machines in a stage", COMMANDS): _LAYOUTS,
    ("atoll", "layer ranges that overlap", COMMANDS): _LAYOUTS,
    ("atoll", "prefill and decode apart", COMMANDS): (
        f"{_EXACT}test_prompts_and_answers_on_different_nodes_are_exact"
    ),
    ("atoll", "apart, prefill a pipeline", "local"): _HELPERS,
    ("atoll", "apart, decode a pipeline", "local"): _HELPERS,
    ("atoll", "a mixture of experts", COMMANDS): f"{_EXACT}test_every_architecture_is_exact",
    ("atoll", "weights in fp8", COMMANDS): _STORED,
    ("atoll", "weights made fp8 as they are loaded", COMMANDS): (
        f"{_MATRIX}test_plain_weights_are_turned_into_fp8_as_they_are_loaded"
    ),
    ("atoll", "weights in int8", COMMANDS): _STORED,
    ("atoll", "weights in int4 (AWQ, GPTQ)", COMMANDS): _STORED,
    ("atoll", "weights in mxfp4", COMMANDS): (
        f"{_MATRIX}test_mxfp4_experts_answer_as_transformers_own_loader"
    ),
    ("atoll", "KV cache in fp8", COMMANDS): (
        "tests/engine/test_kv_bits.py::test_attention_reads_what_was_stored_rounded_to_8_bits"
    ),
}
"""Tests that run the real engine, on cores: by engine, kind of plan and column."""
SERVED: Mapping[tuple[str, str, str], str] = {
    ("vllm", "one GPU", "local"): "8b",
    ("vllm", "weights made fp8 as they are loaded", "local"): "8b-fp8",
    ("vllm", "weights in int4 (AWQ, GPTQ)", "local"): "14b-int4",
    ("vllm", "a mixture of experts", "local"): "moe",
    ("vllm", "one of several on a GPU, by memory share", "local"): "3b-shared",
    ("vllm", "apart, on shares of a GPU", "local"): "3b-pair",
    ("atoll", "one GPU", "local"): "8b-atoll",
}
"""Servers in `RECORD`, which `atoll up` brought up on a GPU and clients asked."""
RECORD = ROOT / "benchmarks" / "results" / "gpu_promise.json"


@dataclass(frozen=True, slots=True)
class Cell:
    """A word of the table, and what it rests on: a test, a record, or why it is refused."""

    word: str
    why: str = ""


def judge(engine: Engine, kind: PlanKind, column: str, catalog: Catalog) -> Cell:
    """Return what is known of an engine in a kind of plan, started by a target or by hand."""
    try:
        orders = write_orders(engine, kind, catalog)
        for order in orders:
            _TRIALS.get(column, _render)(column, order, catalog)
    except AtollError as error:
        return Cell(REFUSED, error.message)
    key = (engine.name, kind.title, column)
    unkept = engine.list_unkept(launch_for(kind, catalog), "bf16")
    if unkept:
        return Cell(Standing.WRITTEN, f"without {'; '.join(unkept)}")
    proofs = [f"`{TESTED[key]}`"] if key in TESTED else []
    if key in SERVED:
        proofs.insert(0, f"`{RECORD.relative_to(ROOT)}` ({SERVED[key]})")
        return Cell(Standing.SERVED, ", ".join(proofs))
    if proofs:
        return Cell(Standing.TESTED, proofs[0])
    return Cell(Standing.WRITTEN)


def launch_for(kind: PlanKind, catalog: Catalog) -> EngineLaunch:
    """Return what engines are told beside their layout."""
    dtype = catalog.model(kind.model).llm.kv_dtype.name
    return EngineLaunch(kv_cache_dtype=None if dtype == "bf16" else dtype)


def write_orders(engine: Engine, kind: PlanKind, catalog: Catalog) -> list[StartOrder]:
    """Return the orders of a plan's instances; what the engine does not run is an AtollError."""
    instances, spec = kind.instances(engine.name), catalog.model(kind.model).llm
    weights = ServiceWeights(
        "hf://org/name",
        ("chat",),
        engine=engine.name,
        quantization=kind.quantization,
        gguf="hf://org/name-GGUF:Q8_0",
    )
    # Secrets are read by some targets as they write: there are none here.
    settings = CommandSettings(fabric="fabric.token")
    orders = []
    for one in instances:
        for node in one.nodes:
            refusal = engine.refuses(spec, catalog.gpu(parse_node_type(node.node_type).gpu))
            if refusal is not None:
                raise UsageError(refusal)
        launch = launch_for(kind, catalog)
        launch = launch.model_copy(update={"handover": handover_of(instances, one)})
        labels = Labels(
            fleet="lab", instance=one.id, plan="p", placement="l", service="chat", role=one.role
        )
        recipe = InstanceRecipe(one, weights, labels, launch)
        commands = recipe.commands(settings)
        # What planners ask is what commands say.
        lacks = list_limits(engine, one, spec, catalog)
        assert not lacks, (
            f"{engine.name} has commands for {kind.title}, and plans avoid it: {lacks}"
        )
        orders.append(
            StartOrder(
                one,
                labels,
                tuple(replace(each, secrets=()) for each in commands),
                recipe=recipe,
            )
        )
    return orders


class _NoDeployer:
    """In the place of a target's deployer: what is rendered must not need one."""


def _render(column: str, order: StartOrder, catalog: Catalog) -> None:
    """Have a target write what it would start."""
    nobody: Deployer = _NoDeployer()  # type: ignore[assignment]
    try:
        TargetSettings().section(column).render_orders([order], nobody, catalog)
    except DeployError as error:
        # It does not refuse the plan: there is nobody here to ask.
        if error.kind == "unreachable":
            raise RuntimeError(f"{column} needs a row in _TRIALS") from error
        raise


def _render_slurm(column: str, order: StartOrder, catalog: Catalog) -> None:
    """Write the batch script, on partitions that have everything."""
    del column, catalog
    parts = group_machines(order)
    settings = SlurmSettings.parse({"work_folder": "/shared"})
    write_script(order, parts, [GpuChoice("gpu", ("long",))] * len(parts), settings, "/home")


def _render_ray(column: str, order: StartOrder, catalog: Catalog) -> None:
    """Write the order of the job, for a cluster that will have everything."""
    del column, catalog
    make_deployer(FakeRay(), autoscales=True).dry_run(order)


def _print(column: str, order: StartOrder, catalog: Catalog) -> None:
    """Print the lines to paste."""
    del column, catalog
    for command in order.commands:
        format_line(command, order.instance, 8000)


_TRIALS: Mapping[str, Callable[[str, StartOrder, Catalog], None]] = {
    COMMANDS: _print,
    "ray": _render_ray,
    "slurm": _render_slurm,
}
"""Targets that need more than settings to write what they would start."""


def best_of(cells: Iterable[Cell]) -> str:
    """Return the word of a row that says most."""
    words = {cell.word for cell in cells}
    order: tuple[str, ...] = (*Standing, REFUSED)
    return next(word for word in order if word in words)


def standing_of(engine: Engine, kind: PlanKind, catalog: Catalog) -> Standing:
    """Return what plans show of an engine in a kind of plan: the least of its instances."""
    found = set()
    for one in kind.instances(engine.name):
        gpus = {catalog.node(node.kind).gpu.architecture for node in one.nodes}
        found.add(engine.standing(engine_layout(one), gpus))
    return next(word for word in reversed(Standing) if word in found)


def find_tests(path: str) -> set[str]:
    """Return the names of the tests in a file."""
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    found = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name for node in found if node.name.startswith("test_")}


def read_servers() -> dict[str, dict[str, str]]:
    """Return the servers of the record of runs on GPUs, by name."""
    servers: dict[str, dict[str, str]] = json.loads(RECORD.read_text("utf-8"))["servers"]
    return servers


# The page


class _Notes:
    """Numbers of what cells rest on; equal ones have one."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, cell: Cell) -> str:
        if not cell.why:
            return cell.word
        if cell.why not in self.texts:
            self.texts.append(cell.why)
        return f"{cell.word} ({self.texts.index(cell.why) + 1})"

    def lines(self) -> Iterator[str]:
        for number, text in enumerate(self.texts, 1):
            yield f"{number}. {text}"


def draw_tables(catalog: Catalog) -> str:
    """Return the tables in Markdown: one for each engine, and number formats by GPU."""
    lines: list[str] = []
    for engine in list_planned():
        notes = _Notes()
        lines += [f"## {engine.title} (`{engine.name}`)", ""]
        lines += [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
        for kind in KINDS:
            cells = [notes.mark(judge(engine, kind, column, catalog)) for column in COLUMNS]
            lines.append(f"| {kind.title} | {' | '.join(cells)} |")
        lines += ["", *notes.lines(), ""]
    return "\n".join([*lines, *_draw_formats(catalog), "", *_draw_any_to_any()]) + "\n"


def _draw_formats(catalog: Catalog) -> Iterator[str]:
    yield "## Number formats of weights, by GPU"
    yield ""
    yield f"| | {' | '.join(GPUS)} |"
    yield "|---" * (len(GPUS) + 1) + "|"
    engines = list_planned()
    for name in dict.fromkeys(name for engine in engines for name in engine.formats):
        spec = catalog.model(f"{DENSE}@{name}").llm
        able = [
            [engine.name for engine in engines if engine.refuses(spec, catalog.gpu(gpu)) is None]
            for gpu in GPUS
        ]
        yield f"| {name} | {' | '.join(', '.join(names) or REFUSED for names in able)} |"


def _draw_any_to_any() -> Iterator[str]:
    yield "## Any-to-any models"
    yield ""
    yield "Executors of a plan, each a process where its target starts it, and the graph server that asks"
    yield "them beside the fleet's gateway. `atoll serve` runs all of it on this machine."
    yield ""
    yield "| Started by | Standing | Rests on |"
    yield "| --- | --- | --- |"
    catalog = Catalog.default()
    for column in COLUMNS:
        cell = _judge_executor(column, catalog)
        yield f"| {column} | {cell.word} | {cell.why} |"
    yield ""
    yield f"{OMNI.title} (`atoll plan --commands --executors {OMNI.name}`) is all executors of a service by"
    yield "one server of one machine: GPUs, copies and memory are the plan's. It has these stages, and plans"
    yield "whose executors cut a stage, or phases of an llm, are refused. Its own reader of stages takes"
    yield f"them (`{OMNI_PARSED}`); it was not run."
    yield ""
    yield "| Model | Stages |"
    yield "| --- | --- |"
    for name, stages in STAGES.items():
        yield f"| {name} | {', '.join('+'.join(sorted(stage.parts)) for stage in stages)} |"


def _judge_executor(column: str, catalog: Catalog) -> Cell:
    """Return what is known of executors that a target starts, or by hand."""
    try:
        order = _order_executor()
        _TRIALS.get(column, _render)(column, order, catalog)
    except AtollError as error:
        return Cell(REFUSED, error.message)
    if column == "local":
        return Cell(Standing.TESTED, f"`{EXECUTORS_TESTED}`")
    return Cell(Standing.WRITTEN)


def _order_executor() -> StartOrder:
    """Return the order of an executor with two parts."""
    parts = ServedParts(
        parts={"vision": ("smollm2-vision",), "llm": ("smollm2",)}, tasks={"chat": "m:Task"}
    )
    one = Instance.parse(
        {
            "id": "look-0",
            "service": "look",
            "role": "look/vision+llm/serve",
            "region": "aws/us-east-2",
            "stages": 1,
            "nodes": [
                {
                    "id": "n0",
                    "node_type": "L4:1",
                    "market": "on-demand",
                    "start": 0,
                    "end": 1,
                    "tp": 1,
                }
            ],
            "flows": [],
            "throughput_per_s": 1.0,
            "usd_per_hour": 0.0,
        }
    )
    labels = Labels(
        fleet="lab", instance=one.id, plan="p", placement="l", service="look", role=one.role
    )
    settings = CommandSettings(fabric="fabric.token", executors="executors.token")
    command = executor_command(one, {one.service: parts}, settings, labels=labels)
    # Secrets are read by some targets as they write: there are none here.
    return StartOrder(one, labels, (replace(command, secrets=()),))


def put_tables(page: str, tables: str) -> str:
    """Return a page with the tables between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the page has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{tables}\n{END}{after}"


def main() -> int:
    """Write the tables."""
    page = PAGE.read_text("utf-8")
    PAGE.write_text(put_tables(page, draw_tables(Catalog.default())), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
