"""The catalog: every fact in one immutable place, looked up by the names people use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from atoll.catalog.frozenmap import FrozenMap
from atoll.catalog.gpus import GpuType, default_gpus
from atoll.catalog.name_lookup import find, index_names, look_up
from atoll.catalog.nodes import (
    Interconnect,
    NodeRule,
    NodeType,
    default_interconnects,
    default_node_rules,
)
from atoll.core.errors import InputError, UnknownNameError
from atoll.core.ids import format_node_type, parse_node_type

if TYPE_CHECKING:
    from atoll.catalog.link_table import LinkTable
    from atoll.catalog.models import ModelSpec
    from atoll.catalog.prices import PriceTable
    from atoll.catalog.relatives import Relatives

# Sizes nobody lists are still allowed up to here: "L40S:3" is a machine someone may own.
_MAX_GPUS = 16
_LONGEST_SHOWN = 40
MAX_SHARES = 8
"""Shares that a GPU may be offered in."""


class Catalog:
    """GPU types, node types, models, prices and links. Never changes; an overlay gives a new one.

    A part that is not given is the one that ships with Atoll, read when it is first asked for.
    """

    __slots__ = (
        "_gpu_index",
        "_gpus",
        "_interconnects",
        "_links",
        "_model_index",
        "_models",
        "_node_overrides",
        "_node_rules",
        "_nodes",
        "_prices",
        "_shares",
        "_variants",
    )

    def __init__(
        self,
        *,
        gpus: Mapping[str, GpuType] | None = None,
        interconnects: Mapping[str, Interconnect] | None = None,
        node_rules: Mapping[str, NodeRule] | None = None,
        node_overrides: Mapping[str, str] | None = None,
        models: Mapping[str, ModelSpec] | None = None,
        prices: PriceTable | None = None,
        links: LinkTable | None = None,
    ) -> None:
        self._gpus = None if gpus is None else FrozenMap(gpus)
        self._interconnects = None if interconnects is None else FrozenMap(interconnects)
        self._node_rules = None if node_rules is None else FrozenMap(node_rules)
        self._node_overrides: FrozenMap[str, str] = FrozenMap(node_overrides)
        self._models = None if models is None else FrozenMap(models)
        self._prices = prices
        self._links = links
        self._gpu_index: dict[str, str] | None = None
        self._model_index: dict[str, str] | None = None
        self._nodes: FrozenMap[str, NodeType] | None = None
        self._shares: dict[str, GpuType] = {}
        self._variants: dict[str, ModelSpec] = {}

    @classmethod
    def default(cls) -> Catalog:
        """The catalog that ships with Atoll."""
        return _DEFAULT

    # Parts

    @property
    def gpus(self) -> Mapping[str, GpuType]:
        """GPU types by canonical name."""
        return default_gpus() if self._gpus is None else self._gpus

    @property
    def interconnects(self) -> Mapping[str, Interconnect]:
        """Interconnects by name."""
        return default_interconnects() if self._interconnects is None else self._interconnects

    @property
    def node_rules(self) -> Mapping[str, NodeRule]:
        """Per GPU type, the node sizes that exist by default and how they are joined."""
        return default_node_rules() if self._node_rules is None else self._node_rules

    @property
    def node_overrides(self) -> Mapping[str, str]:
        """Node type id to interconnect, where it differs from the rule of its GPU type."""
        return self._node_overrides

    @property
    def models(self) -> Mapping[str, ModelSpec]:
        """Models by canonical name, without their precision variants."""
        if self._models is not None:
            return self._models
        from atoll.catalog.models import default_models

        return default_models()

    @property
    def prices(self) -> PriceTable:
        """The price table."""
        if self._prices is not None:
            return self._prices
        from atoll.catalog.prices import default_prices

        return default_prices()

    @property
    def links(self) -> LinkTable:
        """The link table."""
        if self._links is not None:
            return self._links
        from atoll.catalog.link_table import default_links

        return default_links()

    @property
    def nodes(self) -> Mapping[str, NodeType]:
        """The node types that exist by default or in an overlay, by id."""
        if self._nodes is None:
            ids = [
                format_node_type(gpu, count)
                for gpu, rule in self.node_rules.items()
                for count in rule.counts
            ]
            every = dict.fromkeys([*ids, *self.node_overrides])
            self._nodes = FrozenMap({node_id: self._node(node_id) for node_id in every})
        return self._nodes

    # Lookups

    def gpu(self, name: str) -> GpuType:
        """The GPU type called `name` in any spelling: "L40S", "rtx 3090", "A100-80GB".

        The error for one that is not known names the nearest and holds the overlay that would add it.
        """
        whole, slash, shares = name.rpartition("/")
        if slash and shares.isdecimal() and len(shares) == 1:
            return self._share(whole, int(shares))
        if self._gpu_index is None:
            self._gpu_index = index_names((gpu.name, gpu.aliases) for gpu in self.gpus.values())
        gpu = find(name, self.gpus, self._gpu_index)
        if gpu is None:
            from atoll.catalog.relatives import find_relatives

            relatives = find_relatives(name, self.gpus)
            raise UnknownNameError(
                "gpu",
                name,
                self.gpus,
                hint=_overlay_hint(name, self.gpus, relatives),
                nearest=tuple(gpu.name for gpu in relatives.gpus),
            )
        return gpu

    def node(self, node_type: str) -> NodeType:
        """The node type "GPU:COUNT", "L40S:2"; "L40S" alone means one GPU."""
        text, count = parse_node_type(node_type, field="node type")
        gpu = self.gpu(text)
        node_id = format_node_type(gpu.name, count)
        if node_id in self.nodes:
            return self.nodes[node_id]
        rule = self.node_rules.get(gpu.whole.name)
        if gpu.shares > 1 and count <= _MAX_GPUS * gpu.shares:
            return self._node(node_id)
        if count > _MAX_GPUS or rule is None or (count > 1 and rule.interconnect == "none"):
            known = [n for n in self.nodes if parse_node_type(n).gpu == gpu.name]
            raise UnknownNameError("node type", node_type, known)
        return self._node(node_id)

    def model(self, name: str) -> ModelSpec:
        """The model called `name`; "MODEL@fp8" or "MODEL@int4,kv=fp8" is it in that precision."""
        if name in self._variants:
            return self._variants[name]
        base, at, variant = name.partition("@")
        if self._model_index is None:
            names = ((m.name, m.aliases) for m in self.models.values())
            self._model_index = index_names(names)
        model = look_up("model", base.strip(), self.models, self._model_index)
        if at:
            from atoll.catalog.models import apply_variant

            model = apply_variant(model, variant)
        self._variants[name] = model
        return model

    def interconnect(self, name: str) -> Interconnect:
        """The interconnect called `name`."""
        return look_up(
            "interconnect",
            name,
            self.interconnects,
            index_names((n, ()) for n in self.interconnects),
        )

    def _node(self, node_id: str) -> NodeType:
        name, count = parse_node_type(node_id)
        gpu = self.gpu(name)
        rule = self.node_rules.get(name)
        # Shares of a GPU split no layer between them, so nothing has to join them.
        joint = self.node_overrides.get(node_id)
        if joint is None:
            joint = "none" if count == 1 or rule is None else rule.interconnect
        if joint not in self.interconnects:
            raise UnknownNameError(
                "interconnect", joint, self.interconnects, field=f"nodes.{node_id}"
            )
        return NodeType(gpu, count, self.interconnects[joint])

    def _share(self, whole: str, shares: int) -> GpuType:
        """One of the equal shares of a GPU type; the same object each time."""
        gpu = self.gpu(whole)
        if gpu.part_of is not None or not 2 <= shares <= MAX_SHARES:
            raise InputError(
                f"a {gpu.name} in {shares} shares", hint=f"offer a whole GPU in 2 to {MAX_SHARES}"
            )
        name = f"{gpu.name}/{shares}"
        if name not in self._shares:
            self._shares[name] = gpu.in_shares(shares)
        return self._shares[name]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Catalog):
            return NotImplemented
        return self is other or all(
            getattr(self, part) == getattr(other, part)
            for part in (
                "gpus",
                "interconnects",
                "node_rules",
                "node_overrides",
                "models",
                "prices",
                "links",
            )
        )

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return (
            f"Catalog({len(self.gpus)} gpus, {len(self.models)} models, {len(self.prices)} prices)"
        )


def _overlay_hint(name: str, gpus: Mapping[str, GpuType], relatives: Relatives) -> str | None:
    """The overlay that adds a GPU: like what, its memory, bandwidth and rate, in one line of YAML."""
    near = relatives.gpus or tuple(gpus.values())
    example = near[0] if relatives.gpus else gpus.get("L40S", next(iter(near), None))
    if example is None:
        return None
    called = name.strip().replace(" ", "-")
    try:
        parse_node_type(f"{called}:1")
    except InputError:
        called = "MY-GPU"
    called = called if len(called) <= _LONGEST_SHOWN else "MY-GPU"
    memory = f"{(relatives.memory_bytes or example.memory_bytes) / 1e9:.3g}GB"
    bandwidth = f"{example.bandwidth_bytes_per_s / 1e9:.0f}GB/s"
    figures = f"memory: {memory}, bandwidth: {bandwidth}, fp16_tflops: {example.fp16_tflops:g}"
    entry = f"{{like: {example.name}, {figures}}}"
    return (
        "use a known name, or add it with its own figures in an overlay (--overlay FILE, or 'catalog:' of "
        f"a fleet file): 'gpus: {{{called}: {entry}}}'"
    )


_DEFAULT = Catalog()
