"""Everything that training needs, as files small enough to be sent one by one: weights and tokenizer.

A bundle is one safetensors file cut into parts. SmolLM2's weights stay in the blocks of its GGUF file, so
that nothing is lost and little is sent; they are unpacked here with torch alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.components.efficientnet import LiteNetwork

FOLDER = Path("build/projector")
_BLOCK = 32
"""Weights that share a scale, in both kinds of blocks."""
_LLM, _VISION, _TEXT = "llm/", "vision/", "text/"


def write_bundle(
    folder: Path, llm: dict[str, tuple[str, list[int], Tensor]], vision: dict[str, Tensor],
    texts: dict[str, bytes], part_bytes: int,
) -> list[Path]:  # fmt: skip
    """Write the parts and return their paths. `llm`: (kind of block, shape, bytes) by name."""
    from safetensors.torch import save

    tensors = {_LLM + name: raw for name, (_, _, raw) in llm.items()}
    tensors |= {_VISION + name: value for name, value in vision.items()}
    tensors |= {
        _TEXT + name: torch.frombuffer(bytearray(text), dtype=torch.uint8)
        for name, text in texts.items()
    }
    kinds = {name: [kind, shape] for name, (kind, shape, _) in llm.items()}
    whole = save(tensors, metadata={"llm": json.dumps(kinds)})
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("part-*.bin"):
        old.unlink()
    paths = []
    for number, start in enumerate(range(0, len(whole), part_bytes)):
        path = folder / f"part-{number:02d}.bin"
        path.write_bytes(whole[start : start + part_bytes])
        paths.append(path)
    return paths


class Bundle:
    """A bundle read back from its parts."""

    def __init__(self, folder: Path) -> None:
        from safetensors.torch import load

        whole = b"".join(path.read_bytes() for path in sorted(folder.glob("part-*.bin")))
        if not whole:
            raise SystemExit(f"{folder}: there are no parts; run `python -m tools.projector.pack`")
        length = int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8 : 8 + length])
        self._kinds: dict[str, Any] = json.loads(header["__metadata__"]["llm"])
        self._tensors = load(whole)

    def vision(self) -> LiteNetwork:
        """Return EfficientNet-lite0."""
        network = LiteNetwork()
        network.load_state_dict(self._under(_VISION))
        return network.eval().requires_grad_(False)

    def llm(self, layers: int | None = None) -> Any:
        """Return SmolLM2 as a transformers model, in float32; with `layers`, the first ones alone."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(**json.loads(bytes(self._under(_TEXT)["config.json"].tolist())))
        config._attn_implementation = "sdpa"
        if layers is not None:
            config.num_hidden_layers = layers
        model = LlamaForCausalLM(config)
        weights = {
            name: unpack(self._kinds[name][0], self._kinds[name][1], raw)
            for name, raw in self._under(_LLM).items()
            if _layer(name) < config.num_hidden_layers
        }
        missing, unexpected = model.load_state_dict(weights, strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise SystemExit(f"weights do not fit: missing {missing}, unexpected {unexpected}")
        model.tie_weights()
        return model.eval().requires_grad_(False)

    def write_texts(self, folder: Path) -> Path:
        """Write the tokenizer and its settings as a model folder for `TextCodec`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, raw in self._under(_TEXT).items():
            (folder / name).write_bytes(raw.numpy().tobytes())
        return folder

    def _under(self, prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix): value
            for name, value in self._tensors.items()
            if name.startswith(prefix)
        }


def _layer(name: str) -> int:
    """Return the layer that a tensor belongs to; those outside all layers count as the first's."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else 0


def unpack(kind: str, shape: list[int], raw: Tensor) -> Tensor:
    """Return float32 weights of `shape` from the bytes of blocks: F32, Q8_0 or Q4_1."""
    if kind == "F32":
        return raw.view(torch.float32).view(shape).clone()
    if kind == "Q8_0":
        blocks = raw.view(-1, 2 + _BLOCK)
        scale = blocks[:, :2].contiguous().view(torch.float16).float()
        return (scale * blocks[:, 2:].contiguous().view(torch.int8).float()).view(shape)
    if kind == "Q4_1":
        blocks = raw.view(-1, 4 + _BLOCK // 2)
        scale, least = blocks[:, :4].contiguous().view(torch.float16).float().split(1, dim=1)
        codes = torch.cat([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], dim=1).float()
        weights: Tensor = (scale * codes + least).view(shape)
        return weights
    raise SystemExit(f"blocks of the kind {kind} are not known")
