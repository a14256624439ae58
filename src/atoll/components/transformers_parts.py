"""Parts of models of transformers, by themselves: the tower that sees or hears, or the language model.

The classes are transformers' own; what a part does not need is left out before weights are read, so only the
part's tensors of a checkpoint are read and take memory. Another family of models is another row of
`FAMILIES`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from atoll.components.base import Setup
from atoll.core.errors import MissingDependencyError, UsageError
from atoll.engine.engine_errors import WeightsError
from atoll.engine.weights.sources import resolve

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one kind, as their `config.json` calls it (`model_type`).

    model: class of transformers. tower: modules that see or hear, which the rest does without; rest: those
    that the tower does without. before, after: text around a picture in a prompt. has_grid: whether positions
    of a picture's embeddings have a height and a width (M-RoPE), so that the language model has to be told
    them. token_types: the input that says which tokens are a picture's. image_options: of the image
    processor, where the model's processor sets them.
    """

    model: str
    sense: Literal["vision", "audio"]
    tower: tuple[str, ...]
    rest: tuple[str, ...]
    before: str = ""
    after: str = ""
    has_grid: bool = False
    token_types: str | None = None
    image_options: Mapping[str, Any] = field(default_factory=dict)


_LANGUAGE = ("model.language_model", "lm_head")
_TOWER = ("model.vision_tower", "model.multi_modal_projector")


def _qwen(model: str) -> Family:
    return Family(
        model,
        "vision",
        ("model.visual",),
        _LANGUAGE,
        before="<|vision_start|>",
        after="<|vision_end|>",
        has_grid=True,
        token_types="mm_token_type_ids",
    )


FAMILIES: dict[str, Family] = {
    "qwen2_vl": _qwen("Qwen2VLForConditionalGeneration"),
    "qwen2_5_vl": _qwen("Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl": _qwen("Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": _qwen("Qwen3VLMoeForConditionalGeneration"),
    "internvl": Family(
        "InternVLForConditionalGeneration",
        "vision",
        _TOWER,
        _LANGUAGE,
        before="<img>",
        after="</img>",
        image_options={"crop_to_patches": True},
    ),
    "gemma3": Family(
        "Gemma3ForConditionalGeneration",
        "vision",
        _TOWER,
        _LANGUAGE,
        before="\n\n<start_of_image>",
        after="<end_of_image>\n\n",
        token_types="token_type_ids",
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        "audio",
        # Whoever generates asks the encoder's first layers how far they stride.
        ("model.encoder.layers",),
        ("model.decoder", "proj_out"),
    ),
}
"""Families by `model_type`."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A part of a model, loaded; `folder` holds the rest of what its makers published."""

    family: Family
    folder: Path
    model: Any
    device: str


def load_part(
    setup: Setup, name: str, sense: str, *, tower: bool, options: Sequence[str] = ()
) -> ModelPart:
    """Load one part of the model that the option `model` names, on the setup's device.

    Options of every part: model (a Hugging Face folder, or hf://org/name), device ("cpu", "cuda:N", or "auto"
    for a GPU where there is one; the executor's unless it is said), dtype (float32 on CPUs and what the
    checkpoint has on GPUs, unless it is said); `options` are more that the component `name` knows.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError("transformers", "engine", needed_for=name) from error
    opened = open_setup(setup, name, options)
    folder, device = opened.folder, opened.device
    family = read_family(folder, sense)
    transformers.utils.logging.disable_progress_bar()
    part = _part_class(getattr(transformers, family.model), family, tower=tower)
    try:
        model, report = part.from_pretrained(
            folder,
            dtype=opened.dtype or ("float32" if device == "cpu" else "auto"),
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise WeightsError(" ".join(str(error).split())[:300], path=folder) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise WeightsError(
            f"{len(missing)} tensors are missing, {missing[0]} among them", path=folder
        )
    model.to(device).eval().requires_grad_(False)
    return ModelPart(family, folder, model, device)


@dataclass(frozen=True, slots=True)
class OpenedSetup:
    """Where a part's checkpoint lies, the device it goes to, and the dtype it was told, if any."""

    folder: Path
    device: str
    dtype: str | None


def open_setup(setup: Setup, name: str, options: Sequence[str] = ()) -> OpenedSetup:
    """Check the options of a part, fetch its checkpoint where needed, and keep torch to the setup's cores."""
    import torch

    known = ("model", "device", "dtype", *options)
    unknown = sorted(set(setup.options or {}) - set(known))
    if unknown:
        raise UsageError(
            f"unknown option {unknown[0]!r}", field=name, hint=f"use {', '.join(known)}"
        )
    source = setup.option("model")
    if not isinstance(source, str):
        raise UsageError("no model", field=name, hint='say {"model": FOLDER} among its options')
    dtype = setup.option("dtype")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}", field=name, hint=f"use {', '.join(DTYPES)}")
    device = str(setup.option("device", setup.device))
    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(setup.threads)
    # cuDNN's attention plans anew for every length and batch: on an H200 each token took 62 ms instead of 21.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return OpenedSetup(resolve(source), device, dtype)


def read_family(folder: Path, sense: str) -> Family:
    """Return the family of the model in a folder; one without this sense is an error."""
    path = folder / "config.json"
    try:
        kind = json.loads(path.read_text()).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise WeightsError("there is no config.json to read", path=folder) from error
    family = FAMILIES.get(kind)
    if family is None or family.sense != sense:
        names = [name for name, each in FAMILIES.items() if each.sense == sense]
        raise WeightsError(
            f"model_type {kind!r} is not known here",
            path=path,
            hint=f"{sense} is served of {', '.join(names)} (checkpoints in transformers' own form)",
        )
    return family


def _part_class(whole: Any, family: Family, *, tower: bool) -> Any:
    """Return a class of transformers without the modules that a part does not need.

    They are made without memory and dropped before weights are read, which are therefore left in the files.
    """

    def make(self: Any, config: Any) -> None:
        whole.__init__(self, config)
        for path in family.rest if tower else family.tower:
            *parents, last = path.split(".")
            module = self
            for parent in parents:
                module = getattr(module, parent)
            delattr(module, last)

    changes: dict[str, Any] = {
        "__init__": make,
        "__module__": whole.__module__,
        "_keys_to_ignore_on_load_unexpected": [".*"],
    }
    if tower:
        changes["_tied_weights_keys"] = {}
    return type(whole.__name__, (whole,), changes)
