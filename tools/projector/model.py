"""A frozen encoder, a frozen language model, and the projector between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.components.efficientnet import LiteNetwork
from atoll.components.projector import Projector
from tools.projector.pictures import COLOURS, MAX_OBJECTS, SHAPES, Scene, render
from tools.projector.samples import Batch

Hide = Callable[[Tensor], Tensor]
"""What is done to a batch's embeddings, by picture, before the language model sees them."""


class Reader:
    """Looks at pictures and reads prompts; only the projector that it is given has gradients."""

    def __init__(self, vision: LiteNetwork, llm: Any, device: str) -> None:
        self.device = device
        self.type = torch.bfloat16 if device.startswith("cuda") else torch.float32
        self.vision = vision.fold().to(device)
        self.llm = llm.to(device, self.type)
        self.body = self.llm.model
        self.table: Tensor = self.llm.get_input_embeddings().weight

    def compile(self) -> None:
        """Make the language model faster, where the machine can."""
        self.body = torch.compile(self.llm.model)

    def look(self, scenes: list[Scene], *, exact: bool = False) -> Tensor:
        """Return the encoder's features; `exact` in float32, as served, else in bfloat16 on a GPU."""
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=self._fast(exact)):
            pixels = render(scenes, self.device).contiguous(memory_format=torch.channels_last)
            features: Tensor = self.vision.features(pixels).float()
        return features

    def _fast(self, exact: bool) -> bool:
        return not exact and self.type == torch.bfloat16

    def read(self, batch: Batch, embeds: Tensor) -> Tensor:
        """Return the logits where `batch` has targets; `embeds`: [questions, k, width]."""
        device = self.device
        inputs = functional.embedding(batch.tokens.to(device), self.table)
        count = embeds.shape[1]
        places = batch.gap.to(device)[:, None] + torch.arange(count, device=device)
        index = places[:, :, None].expand(-1, -1, inputs.shape[2])
        inputs = inputs.scatter(1, index, embeds.to(inputs.dtype))
        states = self.body(inputs_embeds=inputs, use_cache=False).last_hidden_state
        wanted = states[batch.rows.to(device), batch.columns.to(device)]
        return functional.linear(wanted, self.table).float()


class CountHead(nn.Module):
    """Reads how many of each shape and colour there are off the embeddings: a help in training, not kept."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kinds = len(SHAPES) + len(COLOURS)
        self.head = nn.Linear(width, self.kinds * (MAX_OBJECTS + 1))

    def forward(self, embeds: Tensor, scenes: list[Scene]) -> Tensor:
        """Return the cross entropy of the counts."""
        normed = functional.layer_norm(embeds.float(), embeds.shape[-1:]).mean(dim=1)
        logits = self.head(normed).view(len(scenes) * self.kinds, -1)
        counts = [
            [sum(t.shape == shape for t in scene.things) for shape in SHAPES]
            + [sum(t.colour == colour for t in scene.things) for colour in COLOURS]
            for scene in scenes
        ]
        return functional.cross_entropy(
            logits, torch.tensor(counts, device=embeds.device).flatten()
        )


def start_projector(projector: Projector, reader: Reader) -> Projector:
    """Give the first embeddings the size of the language model's own."""
    with torch.no_grad():
        projector.scale.fill_(float(reader.table.float().std()))
    return projector.to(reader.device)
