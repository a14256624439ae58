"""Layers of a model over matrices in 8 and 4 bits, in the place of transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atoll.engine.matrix import Matrix, PlainMatrix


class MatrixLinear(nn.Module):
    """A linear layer over a matrix of any format; its bias, if it has one, is a parameter."""

    def __init__(self, matrix: Matrix, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.matrix = matrix
        self.out_features, self.in_features = matrix.outputs, matrix.depth
        self.register_parameter("bias", bias)

    def forward(self, rows: Tensor) -> Tensor:
        """Multiply; any leading shape."""
        product = self.matrix.product(rows)
        bias = self._parameters["bias"]
        return product if bias is None else product.add_(bias)


class MatrixExperts(nn.Module):
    """Experts of a layer over matrices: of each, gate and up in one and down in another.

    How gates are applied, and biases, are those of the experts that they take the place of.
    """

    def __init__(self, experts: Any, gate_up: Sequence[Matrix], down: Sequence[Matrix]) -> None:
        super().__init__()
        self.gate_up, self.down = tuple(gate_up), tuple(down)
        self._apply_gate: Callable[[Tensor], Tensor] = experts._apply_gate
        for name, parameter in experts.named_parameters():
            if name not in ("gate_up_proj", "down_proj"):
                self.register_parameter(name, parameter)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of experts: hidden [rows, width], chosen and weights [rows, k]."""
        out = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            # Numbers past the last expert stand for none.
            if expert >= len(self.gate_up):
                continue
            row, place = torch.where(chosen == expert)
            inner = self._apply_gate(self._multiply("gate_up", expert, hidden[row]))
            result = self._multiply("down", expert, inner) * weights[row, place, None]
            out.index_add_(0, row, result.to(hidden.dtype))
        return out

    def _multiply(self, which: str, expert: int, rows: Tensor) -> Tensor:
        matrices: tuple[Matrix, ...] = getattr(self, which)
        bias = self._parameters.get(f"{which}_proj_bias")
        product = matrices[expert].product(rows)
        return product if bias is None else product + bias[expert]


def matrix_of(linear: Any) -> Matrix:
    """Return the matrix of a linear layer."""
    if isinstance(linear, MatrixLinear):
        return linear.matrix
    return PlainMatrix(linear.weight.data)


def list_matrices(module: nn.Module) -> list[Matrix]:
    """Return the matrices inside a module that are no parameters of it."""
    found: list[Matrix] = []
    for child in module.modules():
        if isinstance(child, MatrixLinear):
            found.append(child.matrix)
        elif isinstance(child, MatrixExperts):
            found += [*child.gate_up, *child.down]
    return found
