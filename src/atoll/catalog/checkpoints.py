"""Checkpoints: weights as published, and how their tensors are stored.

A checkpoint says by which method it was quantised and which parts stay in 16 bits; bytes follow from the
model's shapes. Embeddings, output matrix, norms, biases and routers stay in 16 bits with every method but
llama.cpp's, which narrow the first two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, cast, get_args

from atoll.catalog.dtypes import GGUF, GGUF_OUTER, DType, dtype_of, group_bits
from atoll.catalog.transformer import TransformerSpec
from atoll.core.errors import InputError, UnknownNameError

KeptPart = Literal["attention", "mlp", "experts", "ends"]
"""A part that a checkpoint leaves in 16 bits: matrices of attention; those of dense MLPs and shared experts;
those of routed experts; all of the first and the last layer."""
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Method:
    """A way to store matrices: bits of a weight, and a scale and a zero point for every `group` of them.

    Without a group one scale serves a tensor or a row of it.
    """

    format: str
    bits: int
    group: int | None = None
    scale_bits: int = 16
    zero_bits: int = 0

    def dtype(self, group: int | None = None) -> DType:
        """Return the format with what scales and zero points take, for groups of another size if given."""
        return group_bits(
            self.format,
            self.bits,
            group or self.group,
            scale_bits=self.scale_bits,
            zero_bits=self.zero_bits,
        )


METHODS: Mapping[str, Method] = {
    # Of a format the first is the usual one. Engines that quantise as they load do as "fp8".
    "fp8": Method("fp8", 8),
    "fp8-block": Method("fp8", 8, 128 * 128, scale_bits=32),
    "int8": Method("int8", 8),
    "awq": Method("int4", 4, 128, zero_bits=4),
    "gptq": Method("int4", 4, 128, zero_bits=4),
    "w4a16": Method("int4", 4, 128),
    "nvfp4": Method("nvfp4", 4, 16, scale_bits=8),
    "mxfp4": Method("mxfp4", 4, 32, scale_bits=8),
}
"""Ways to store matrices, by the names that checkpoints have for them."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights as published: a repository of Hugging Face's hub, and a revision of it where one is known.

    Where `repository` begins with a slash it is a folder instead, on the machines that serve the model.

    `method` is one of METHODS (of weights in 16 bits their format), `group` how many weights share a scale
    where that is not as usual, and `kept` are parts in 16 bits. `quantization` is the
    format that engines turn the weights into as they load them, where that is another.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    repository: str
    revision: str | None = None
    method: str | None = None
    group: int | None = None
    kept: tuple[KeptPart, ...] = ()
    quantization: str | None = None

    def __post_init__(self) -> None:
        for part in self.kept:
            if part not in get_args(KeptPart):
                raise UnknownNameError(
                    "part of a model", part, get_args(KeptPart), field="checkpoints.kept"
                )
        if self.group is not None and self.group < 1:
            raise InputError(
                f"{self.group} weights share no scale",
                field="checkpoints.group",
                hint="write how many share one, as 128",
            )
        if self.revision is not None and not _REVISION.fullmatch(self.revision):
            raise InputError(
                f"{self.revision!r} is no revision of a repository",
                field="checkpoints.revision",
                hint="write a commit, a tag or a branch",
            )

    @property
    def source(self) -> str:
        """The weights as sources are written: a folder, or hf://ORG/NAME with the revision behind an @."""
        if self.repository.startswith("/"):
            return self.repository
        return f"hf://{self.repository}" + (f"@{self.revision}" if self.revision else "")

    @property
    def given(self) -> dict[str, object]:
        """Fields that say something, by name, as data files write them."""
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in said.items()
            if value
        }

    def describe(self) -> str:
        """Return the repository with its method, revision and parts in 16 bits, in a line."""
        more = [
            f"{self.method}" if self.group is None else f"{self.method}, groups of {self.group}"
        ]
        more += [f"{', '.join(self.kept)} in 16 bits"] if self.kept else []
        more += [f"revision {self.revision}"] if self.revision else []
        return f"{self.repository} ({'; '.join(more)})"

    def stored(self, spec: TransformerSpec, precision: str) -> TransformerSpec:
        """Return a model with its matrices as this checkpoint stores them, in the format of that name."""
        dtype, whole = self._dtype(precision), spec.activation_dtype
        return replace(
            spec,
            attention_dtype=whole if "attention" in self.kept else dtype,
            mlp_dtype=whole if "mlp" in self.kept else dtype,
            expert_dtype=whole if "experts" in self.kept else dtype,
            embedding_dtype=GGUF_OUTER.get(precision, spec.embedding_dtype),
            wide_layers=frozenset((0, spec.layers - 1)) if "ends" in self.kept else frozenset(),
        )

    def _dtype(self, precision: str) -> DType:
        method = METHODS.get(self.method or "")
        return dtype_of(precision) if method is None else method.dtype(self.group)


def read_checkpoint(precision: str, given: Mapping[str, object]) -> Checkpoint:
    """Return the checkpoint of a model in a precision, as data files write it: the fields that are given.

    Without a method it is the usual one of the format.
    """
    usual = [name for name, method in METHODS.items() if method.format == precision]
    own = precision if precision == GGUF else dtype_of(precision).name
    said = {"method": usual[0] if usual else own, **given}
    method = said["method"]
    if method not in usual and method != precision:
        known = usual or (precision,)
        raise UnknownNameError(
            f"{precision} method", str(method), known, field="checkpoints.method"
        )
    kept = tuple(cast("list[KeptPart]", said.pop("kept", ())))
    return Checkpoint(kept=kept, **said)  # type: ignore[arg-type]
