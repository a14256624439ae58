"""An engine is one object: whoever accepts, starts, asks or recognises engines looks it up in the table."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import ClassVar

import pytest

import atoll
from atoll.catalog.catalog import Catalog
from atoll.core.errors import InputError, UnknownNameError
from atoll.deploy.commands.node_commands import (
    CommandSettings,
    ServiceWeights,
    choose_engine,
    node_commands,
)
from atoll.engines.engine import (
    Engine,
    EngineLayout,
    ServedModel,
    ServerCommand,
    ServerHost,
    is_whole,
)
from atoll.engines.table import (
    ENGINES,
    find_engine,
    find_launched,
    list_kinds,
    list_launched,
    list_planned,
    recognise,
)
from atoll.fabric.registry.records import Hardware
from atoll.runtime.endpoints.endpoint import RunDirectory
from atoll.runtime.federation.members import kind_of
from atoll.runtime.join.assignment import Assignment, check
from atoll.runtime.join.engine_command import read_command
from atoll.runtime.join.engine_start import engine_for_order
from atoll.runtime.join.join_options import JoinOptions
from atoll.runtime.local.local_endpoints import LocalModel, LocalOptions, build, list_warnings
from atoll.runtime.local.local_fleet import LivenessTracker
from atoll.runtime.pool.member import Backend
from tests.runtime.local.test_placing import instance, plan


class ToyEngine(Engine):
    """All that a new engine has to say."""

    name = "toy"
    title = "Toy"
    aliases = ("toy-server",)
    launches = True
    max_nodes = 1
    settings: ClassVar = {"threads": is_whole}
    settings_are_flags = True
    program = re.compile("toyserve")
    default_port = 7777
    resume = "repeat"

    def command(self, layout: EngineLayout, served: ServedModel, host: ServerHost) -> ServerCommand:
        words = ("toyserve", served.source, "--port", host.port, "--tp", str(layout.tp))
        return ServerCommand(words, {"TOY": "1"})


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = ToyEngine()
    monkeypatch.setitem(ENGINES, engine.name, engine)
    return engine


@pytest.mark.usefixtures("toy")
def test_serve_starts_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4}')
    made, options = plan(instance([(0, 4)])), LocalOptions(engine="toy", cores=(0,))
    models = {"chat": LocalModel("hf://org/name", tmp_path)}
    (named,) = build(made, models, RunDirectory(tmp_path), LivenessTracker(), options)
    server = named.endpoint.server
    assert server is not None
    assert server.command.arguments[:3] == ("toyserve", "hf://org/name", "--port")
    assert server.command.surroundings()["TOY"] == "1"
    assert named.endpoint.backend.kind == "toy"
    assert list_warnings(made, ["chat"], options) == ()


@pytest.mark.usefixtures("toy")
def test_up_commands_it_and_keeps_its_limits() -> None:
    weights = ServiceWeights("hf://org/name", ("chat",), engine="toy")
    (command,) = node_commands(instance([(0, 4)]), weights, CommandSettings())
    assert command.argv == ("toyserve", "hf://org/name", "--port", "{port}", "--tp", "1")
    assert command.env == (("TOY", "1"),)
    with pytest.raises(InputError, match="Toy runs on one"):
        node_commands(instance([(0, 2), (2, 4)]), weights, CommandSettings())
    # Nobody gets it without asking: it takes no weights by itself.
    plain = ServiceWeights("hf://org/name", ("chat",))
    assert choose_engine(instance([(0, 4)]), plain).name != "toy"


@pytest.mark.usefixtures("toy")
def test_a_node_is_assigned_it_and_starts_it(tmp_path: Path) -> None:
    order = Assignment(engine="toy", model="org/name", settings={"threads": "4"})
    check(order)
    with pytest.raises(UnknownNameError, match="setting of toy"):
        check(Assignment(engine="toy", model="org/name", settings={"dtype": "half"}))
    started = engine_for_order(order, JoinOptions(), Hardware(), RunDirectory(tmp_path))
    assert started.title == "toy with org/name"
    assert started.command is not None
    assert started.command.arguments[-2:] == ("--threads", "4")


@pytest.mark.usefixtures("toy")
def test_it_is_recognised_where_somebody_else_runs_it() -> None:
    read = read_command(("srun", "toyserve", "--model", "org/name"))
    assert (read.engine, read.url) == ("toy", "http://127.0.0.1:7777")
    assert kind_of("Toy-Server") == "toy"
    assert Backend(id="a", url="http://127.0.0.1:1", models=("m",), kind="toy").kind == "toy"


def test_one_that_is_not_in_the_table_is_refused_everywhere() -> None:
    with pytest.raises(UnknownNameError, match="unknown engine 'toy'"):
        find_launched("toy")
    with pytest.raises(UnknownNameError):
        check(Assignment(engine="toy", model="org/name"))
    with pytest.raises(ValueError, match="a backend is one of"):
        Backend(id="a", url="http://127.0.0.1:1", models=("m",), kind="toy")
    assert kind_of("toy") == "openai"


@pytest.mark.parametrize(
    ("engine", "gpu", "model", "why"),
    [
        ("vllm", "MI250", "llama-3.1-8b", None),
        ("vllm", "MI250", "llama-3.1-8b@int4", None),
        ("vllm", "MI250", "llama-3.1-8b@fp8", "vLLM has no fp8 on MI250"),
        ("vllm", "MI300X", "llama-3.1-8b@fp8", None),
        ("sglang", "MI250", "gpt-oss-20b", "SGLang has no mxfp4 on MI250"),
        ("vllm", "V100-32", "llama-3.1-8b", "vLLM needs compute capability 7.5, and V100-32 has 7"),
        ("atoll", "V100-32", "llama-3.1-8b", None),
        ("atoll", "V100-32", "llama-3.1-8b@fp8", None),
        ("atoll", "A100-80", "gpt-oss-20b", None),
        ("atoll", "H200", "llama-3.1-8b@int4", None),
        ("atoll", "B200", "llama-3.1-8b@nvfp4", "the stage engine has no nvfp4 on B200"),
        ("atoll", "MI300X", "llama-3.1-8b@fp8", "the stage engine does not run on MI300X"),
        ("atoll", "H200", "deepseek-v3", "the stage engine has no latent attention"),
        ("atoll", "H200", "qwen3-next-80b-a3b", "the stage engine has no linear attention"),
        ("vllm", "RTX3060", "llama-3.1-8b@fp8", None),
        ("vllm", "M3-Max-36", "llama-3.1-8b", "vLLM does not run on M3-Max-36"),
        ("vllm", "L4", "llama-3.1-8b@q8_0", "vLLM has no q8_0 on L4"),
        ("llamacpp", "M3-Max-36", "llama-3.1-8b", None),
        ("llamacpp", "M3-Max-36", "llama-3.1-8b@q4_k_m", None),
        ("llamacpp", "M3-Max-36", "llama-3.1-8b@int4", "llama.cpp has no int4 on M3-Max-36"),
        ("llamacpp", "V100-32", "gpt-oss-20b", None),
        ("llamacpp", "MI250", "llama-3.1-8b@q8_0", None),
        ("llamacpp", "L4", "llama-3.1-8b@kv=fp8", "llama.cpp has no KV cache in fp8"),
    ],
)
def test_which_gpus_and_formats_an_engine_has(
    engine: str, gpu: str, model: str, why: str | None
) -> None:
    catalog = Catalog.default()
    assert find_engine(engine).refuses(catalog.model(model).llm, catalog.gpu(gpu)) == why


def test_every_file_of_an_engine_is_in_the_table() -> None:
    folder = Path(atoll.__file__).parent / "engines"
    files = [
        f for f in folder.glob("*.py") if re.search(r"^ENGINE = ", f.read_text(), re.MULTILINE)
    ]
    assert len(ENGINES) == len(files)
    order = ["llamacpp", "vllm", "atoll", "sglang"]
    assert [engine.name for engine in list_launched() if engine.name in order] == order
    # Plans take llama.cpp where nothing else runs.
    assert [engine.name for engine in list_planned()] == ["vllm", "atoll", "sglang", "llamacpp"]
    assert set(list_kinds()) >= {"atoll", "vllm", "llamacpp", "sglang", "openai", "tasks"}
    for engine in ENGINES.values():
        assert recognise(engine.name) is find_engine(engine.name) is engine
        assert engine.kind in ENGINES


EXCEPTIONS = {
    "control/virtual/operator_comparison.py": "a contender of a comparison is called atoll",
    "control/virtual/operation_page.py": "the same contender",
    "deploy/slurm/script.py": "the program `atoll` in a command",
    "runtime/join/engine_command.py": "the program llama-server, whose option -m names a model and no module",
    "runtime/executor/openai_chat.py": "forms in which vectors are sent, named after who defined them",
}


def list_name_comparisons(text: str) -> list[int]:
    """Lines of a module that compare something with the name of an engine, or list several names."""
    names = {name for engine in ENGINES.values() for name in (engine.name, *engine.aliases)}
    names -= {"openai", "none", "tasks"}  # these words mean other things too
    if not any(f'"{name}"' in text for name in names):
        return []  # parsing takes long, and the formatter writes these quotes
    lines = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            parts, limit = [node.left, *node.comparators], 1
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            parts, limit = node.elts, 2
        elif isinstance(node, ast.Dict):
            parts, limit = [key for key in node.keys if key is not None], 2
        else:
            continue
        named = [p for p in parts if isinstance(p, ast.Constant) and p.value in names]
        lines += [node.lineno] if len(named) >= limit else []
    return lines


def test_nobody_else_compares_names_of_engines() -> None:
    root = Path(atoll.__file__).parent
    found = {
        str(path.relative_to(root)): lines
        for path in sorted(root.rglob("*.py"))
        if path.parent.name != "engines"
        and (lines := list_name_comparisons(path.read_text("utf-8")))
    }
    assert {file: lines for file, lines in found.items() if file not in EXCEPTIONS} == {}
    assert set(EXCEPTIONS) == set(found), "an exception that is none any more"
