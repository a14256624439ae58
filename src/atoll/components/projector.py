"""Projectors: from an encoder's features into the space of a language model's token embeddings.

Three kinds, all small. `linear` and `mlp` turn each of the 49 places into one embedding; `mixer` lets
places and a few free slots attend to each other and gives the slots: fewer embeddings that know more.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.engine.engine_errors import WeightsError

KINDS = ("linear", "mlp", "mixer")


@dataclass(frozen=True, slots=True)
class ProjectorShape:
    """Sizes of a projector; written beside its weights.

    places x inputs: the encoder's tokens and their width. outputs: the width of the language model.
    hidden, layers, heads, widening, slots: of the mixer; the mlp uses `hidden` alone.
    """

    kind: str = "mixer"
    places: int = 49
    inputs: int = 1280
    outputs: int = 576
    hidden: int = 256
    layers: int = 2
    heads: int = 4
    widening: int = 3
    slots: int = 16

    @property
    def embeds(self) -> int:
        """How many embeddings one picture becomes."""
        return self.slots if self.kind == "mixer" else self.places


class Projector(nn.Module):
    """Turns [batch, places, inputs] into [batch, embeds, outputs]."""

    def __init__(self, shape: ProjectorShape) -> None:
        super().__init__()
        self.shape = shape
        if shape.kind == "linear":
            self.body: nn.Module = nn.Linear(shape.inputs, shape.outputs)
            self.place = nn.Parameter(torch.zeros(shape.places, shape.outputs))
        elif shape.kind == "mlp":
            self.body = nn.Sequential(
                nn.Linear(shape.inputs, shape.hidden),
                nn.GELU(),
                nn.Linear(shape.hidden, shape.outputs),
            )
            self.place = nn.Parameter(torch.zeros(shape.places, shape.outputs))
        elif shape.kind == "mixer":
            self.body = Mixer(shape)
            self.place = nn.Parameter(torch.zeros(shape.slots, shape.outputs))
        else:
            raise WeightsError(f"unknown kind of projector {shape.kind!r}", hint=f"one of {KINDS}")
        self.scale = nn.Parameter(torch.ones(shape.outputs))

    def forward(self, features: Tensor) -> Tensor:
        """Return embeddings, each of the size that `scale` says."""
        states = self.body(features)
        normed = functional.layer_norm(states, states.shape[-1:])
        return normed * self.scale + self.place


class Mixer(nn.Module):
    """Self-attention over the encoder's places and free slots; gives the slots."""

    def __init__(self, shape: ProjectorShape) -> None:
        super().__init__()
        width = shape.hidden
        self.enter = nn.Linear(shape.inputs, width)
        self.place = nn.Parameter(torch.randn(shape.places, width) * 0.02)
        self.slot = nn.Parameter(torch.randn(shape.slots, width) * 0.5)
        self.layers = nn.ModuleList(MixerLayer(shape) for _ in range(shape.layers))
        self.leave = nn.Linear(width, shape.outputs)

    def forward(self, features: Tensor) -> Tensor:
        """Return [batch, slots, outputs]."""
        entered = self.enter(features)
        places = functional.layer_norm(entered, entered.shape[-1:]) + self.place
        slots = self.slot.to(places.dtype).expand(len(features), -1, -1)
        states = torch.cat([slots, places], dim=1)
        for layer in self.layers:
            states = layer(states)
        left: Tensor = self.leave(states[:, : self.slot.shape[0]])
        return left


class MixerLayer(nn.Module):
    """Attention and a feed-forward part, each on normalised states and added to them."""

    def __init__(self, shape: ProjectorShape) -> None:
        super().__init__()
        width = shape.hidden
        self.heads = shape.heads
        self.before = nn.LayerNorm(width)
        self.ask = nn.Linear(width, 3 * width)
        self.gather = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.widen = nn.Linear(width, shape.widening * width)
        self.narrow = nn.Linear(shape.widening * width, width)

    def forward(self, states: Tensor) -> Tensor:
        """Return the states after this layer."""
        batch, count, width = states.shape
        asked = self.ask(self.before(states)).view(batch, count, 3, self.heads, -1)
        query, key, value = asked.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value)
        states = states + self.gather(seen.transpose(1, 2).reshape(batch, count, width))
        inner = functional.gelu(self.widen(self.between(states)))
        out: Tensor = states + self.narrow(inner)
        return out


def save_projector(projector: Projector, path: Path, notes: dict[str, str] | None = None) -> None:
    """Write weights as float16 with the shape, and `notes`, in the file's header."""
    from safetensors.torch import save_file

    tensors = {
        name: value.detach().to("cpu", torch.float16).contiguous()
        for name, value in projector.state_dict().items()
    }
    metadata = {"shape": json.dumps(asdict(projector.shape)), **(notes or {})}
    save_file(tensors, path, metadata=metadata)


def load_projector(path: Path) -> Projector:
    """Read a projector that `save_projector` wrote, in float32."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise WeightsError(
            "there is no trained projector",
            path=path,
            hint="train one with tools/projector, or name its file in the option 'projector'",
        )
    try:
        with safe_open(path, framework="pt") as file:
            shape = ProjectorShape(**json.loads((file.metadata() or {})["shape"]))
            projector = Projector(shape)
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        projector.load_state_dict(tensors)
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise WeightsError(f"not a projector: {error}", path=path) from error
    return projector.eval().requires_grad_(False)
