"""Qwen-Image in three parts, by diffusers: reader of prompts, diffusion transformer, decoder of pictures.

Each part is diffusers' own pipeline without the others, so weights of a part alone are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np

from atoll.components.base import BadInputError, BatchComponent, Inputs, Output, Setup
from atoll.components.transformers_parts import open_setup
from atoll.core.errors import MissingDependencyError
from atoll.engine.engine_errors import WeightsError

_MODULES = ("text_encoder", "tokenizer", "transformer", "vae")
_MAX_PROMPT = 32_000
_MAX_STEPS = 200
_MAX_SIDE = 4096
_SMALL = {"height": 64, "width": 64}
"""The picture of examples."""


class QwenImagePart(BatchComponent):
    """A pipeline of diffusers with the modules of one part. Options: model, device, dtype (`load_part`)."""

    modules: ClassVar[tuple[str, ...]]

    def __init__(self, pipeline: Any, device: str) -> None:
        self._pipeline = pipeline
        self._device = device

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Read the part's modules from a checkpoint's folder."""
        try:
            import torch
            from diffusers import QwenImagePipeline
            from diffusers.utils import logging
        except ImportError as error:
            raise MissingDependencyError("diffusers", "diffusion", needed_for=cls.name) from error
        opened = open_setup(setup, cls.name)
        dtype = opened.dtype or ("float32" if opened.device == "cpu" else "bfloat16")
        logging.disable_progress_bar()
        try:
            pipeline = QwenImagePipeline.from_pretrained(
                opened.folder,
                dtype=getattr(torch, dtype),
                local_files_only=True,
                use_safetensors=True,
                **dict.fromkeys(name for name in _MODULES if name not in cls.modules),
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise WeightsError(" ".join(str(error).split())[:300], path=opened.folder) from error
        pipeline.set_progress_bar_config(disable=True)
        return cls(pipeline.to(opened.device), opened.device)

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output | BadInputError]:
        """Run what is good together."""
        import torch

        outputs: list[Output | BadInputError] = [self.check(inputs) for inputs in batch]
        alike: dict[object, list[int]] = {}
        for place, inputs in enumerate(batch):
            if outputs[place] is None:
                alike.setdefault(self.batch_key(inputs), []).append(place)
        with torch.inference_mode():
            for places in alike.values():
                made = self.make([batch[place] for place in places])
                for place, output in zip(places, made, strict=True):
                    outputs[place] = output
        return outputs

    def check(self, inputs: Inputs) -> BadInputError | None:
        """Return what is wrong with inputs."""
        raise NotImplementedError

    def make(self, batch: Sequence[Inputs]) -> list[Output]:
        """Return outputs of good inputs that share a batch key."""
        raise NotImplementedError

    def _send(self, array: Any, module: Any) -> Any:
        import torch

        return torch.from_numpy(np.array(array)).to(self._device, module.dtype)


class QwenImageText(QwenImagePart):
    """prompt: a text -> {"embeds": float32 [tokens, width]}."""

    name: ClassVar[str] = "qwen-image-text"
    modules: ClassVar[tuple[str, ...]] = ("text_encoder", "tokenizer")

    def example(self) -> Inputs:
        """Return a word."""
        return {"prompt": "sea"}

    def check(self, inputs: Inputs) -> BadInputError | None:
        """Refuse what is no text."""
        prompt = inputs.get("prompt")
        if isinstance(prompt, str) and len(prompt) <= _MAX_PROMPT:
            return None
        return BadInputError(f"give a text of at most {_MAX_PROMPT} characters", "prompt")

    def make(self, batch: Sequence[Inputs]) -> list[Output]:
        """Read prompts together."""
        embeds, mask = self._pipeline.encode_prompt([inputs["prompt"] for inputs in batch])
        lengths = [embeds.shape[1]] * len(batch) if mask is None else mask.sum(1).tolist()
        rows = embeds.float().cpu().numpy()
        return [{"embeds": np.array(rows[n, :length])} for n, length in enumerate(lengths)]


class QwenImageDit(QwenImagePart):
    """embeds, steps, seed, height, width -> {"latents": float32 [patches, channels]}."""

    name: ClassVar[str] = "qwen-image-dit"
    modules: ClassVar[tuple[str, ...]] = ("transformer",)
    max_batch: ClassVar[int] = 4

    def example(self) -> Inputs:
        """Return one step of a small picture."""
        width = self._pipeline.transformer.config.joint_attention_dim
        return {"embeds": np.zeros((4, width), np.float32), "steps": 1, "seed": 0, **_SMALL}

    def batch_key(self, inputs: Inputs) -> object:
        """Return steps and size: all of a batch share them."""
        return tuple(str(inputs.get(name)) for name in ("steps", "height", "width"))

    def check(self, inputs: Inputs) -> BadInputError | None:
        """Refuse what the network could not read."""
        width = self._pipeline.transformer.config.joint_attention_dim
        if not _is_rows(inputs.get("embeds"), width):
            return BadInputError(f"embeds have to be float32 [tokens, {width}]", "embeds")
        if not _is_whole(inputs.get("steps"), 1, _MAX_STEPS):
            return BadInputError(f"give a whole number, 1 to {_MAX_STEPS}", "steps")
        if not _is_whole(inputs.get("seed"), 0, 2**63 - 1):
            return BadInputError("give a whole number from 0 on", "seed")
        return _wrong_size(inputs, 2 * self._pipeline.vae_scale_factor)

    def make(self, batch: Sequence[Inputs]) -> list[Output]:
        """Draw together, each from its own noise, which is the same on every device."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        rows = [self._send(inputs["embeds"], self._pipeline.transformer) for inputs in batch]
        there = [torch.ones(len(each), dtype=torch.long, device=self._device) for each in rows]
        latents = self._pipeline(
            prompt_embeds=pad_sequence(rows, batch_first=True),
            prompt_embeds_mask=pad_sequence(there, batch_first=True),
            true_cfg_scale=1.0,
            height=batch[0]["height"],
            width=batch[0]["width"],
            num_inference_steps=batch[0]["steps"],
            generator=[torch.Generator("cpu").manual_seed(inputs["seed"]) for inputs in batch],
            output_type="latent",
        ).images
        return [{"latents": np.array(each)} for each in latents.float().cpu().numpy()]


class QwenImageVae(QwenImagePart):
    """latents, height, width -> {"image": uint8 [height, width, 3]}."""

    name: ClassVar[str] = "qwen-image-vae"
    modules: ClassVar[tuple[str, ...]] = ("vae",)
    max_batch: ClassVar[int] = 4

    @property
    def _step(self) -> int:
        """Pixels of a side that one row of latents stands for."""
        return 2 * int(self._pipeline.vae_scale_factor)

    def example(self) -> Inputs:
        """Return a small picture of nothing."""
        rows = (_SMALL["height"] // self._step) * (_SMALL["width"] // self._step)
        channels = 4 * self._pipeline.vae.config.z_dim
        return {"latents": np.zeros((rows, channels), np.float32), **_SMALL}

    def batch_key(self, inputs: Inputs) -> object:
        """Return the size: all of a batch share it."""
        return (str(inputs.get("height")), str(inputs.get("width")))

    def check(self, inputs: Inputs) -> BadInputError | None:
        """Refuse latents of another size."""
        if (wrong := _wrong_size(inputs, self._step)) is not None:
            return wrong
        channels = 4 * self._pipeline.vae.config.z_dim
        rows = (inputs["height"] // self._step) * (inputs["width"] // self._step)
        latents = inputs.get("latents")
        if _is_rows(latents, channels) and len(inputs["latents"]) == rows:
            return None
        return BadInputError(f"latents have to be float32 [{rows}, {channels}]", "latents")

    def make(self, batch: Sequence[Inputs]) -> list[Output]:
        """Decode together, as the end of diffusers' pipeline does."""
        import torch

        pipeline, vae = self._pipeline, self._pipeline.vae
        packed = self._send(np.stack([inputs["latents"] for inputs in batch]), vae)
        latents = pipeline._unpack_latents(
            packed, batch[0]["height"], batch[0]["width"], pipeline.vae_scale_factor
        )

        def wide(values: Any) -> Any:
            return torch.tensor(values).view(1, -1, 1, 1, 1).to(latents.device, latents.dtype)

        latents = latents / (1.0 / wide(vae.config.latents_std)) + wide(vae.config.latents_mean)
        made = vae.decode(latents, return_dict=False)[0][:, :, 0]
        pictures = pipeline.image_processor.postprocess(made, output_type="pil")
        return [{"image": np.array(picture)} for picture in pictures]


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_rows(value: object, width: int) -> bool:
    return (
        isinstance(value, np.ndarray)
        and value.dtype == np.float32
        and value.ndim == 2
        and value.shape[1] == width
        and len(value) > 0
    )


def _wrong_size(inputs: Inputs, step: int) -> BadInputError | None:
    for name in ("height", "width"):
        value = inputs.get(name)
        if not _is_whole(value, step, _MAX_SIDE) or inputs[name] % step:
            return BadInputError(f"give a multiple of {step} up to {_MAX_SIDE}", name)
    return None
