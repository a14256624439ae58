"""Facts the planner starts from, each with a source: GPUs, nodes, links, models, prices."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.catalog.facts import Fact
    from atoll.catalog.gpus import GpuType
    from atoll.catalog.links import Link, LinkTable
    from atoll.catalog.models import ModelSpec
    from atoll.catalog.nodes import AllReduceCost, Interconnect, NodeType
    from atoll.catalog.prices import Price
    from atoll.catalog.transformer import DType, MoeSpec, TransformerSpec

# Loaded on first use: a caller that wants a GPU's bandwidth should not pay for pydantic.
_HOME = {
    "AllReduceCost": "nodes",
    "Catalog": "catalog",
    "DType": "transformer",
    "Fact": "facts",
    "GpuType": "gpus",
    "Interconnect": "nodes",
    "Link": "links",
    "LinkTable": "links",
    "ModelSpec": "models",
    "MoeSpec": "transformer",
    "NodeType": "nodes",
    "Price": "prices",
    "TransformerSpec": "transformer",
}

__all__ = [
    "AllReduceCost",
    "Catalog",
    "DType",
    "Fact",
    "GpuType",
    "Interconnect",
    "Link",
    "LinkTable",
    "ModelSpec",
    "MoeSpec",
    "NodeType",
    "Price",
    "TransformerSpec",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(f"atoll.catalog.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
