"""Facts the planner starts from, each with a source: GPUs, nodes, links, models, prices.

Begin with `catalog` (look-ups by name) and `facts` (a value with its source). Data files lie in `data/`.

    gpus, nodes, link_table, prices        hardware and what it costs
    models, transformer, media, mixers     models as graphs of components, and their shapes
    hf_config, hf_parts, quantization      models read from a Hugging Face config.json
    overlay, overlay_models, overlay_schema    a user's own facts over the shipped ones
    document, fields, resources, describe  reading data files, and showing what is known of a name

Imports `core` alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.catalog.facts import Fact
    from atoll.catalog.gpus import GpuType
    from atoll.catalog.link_table import Link, LinkTable
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
    "Link": "link_table",
    "LinkTable": "link_table",
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
