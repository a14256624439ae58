"""The pool of a fleet file: cloud prices, one's own machines and written-out offers, as offers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from atoll.catalog.catalog import Catalog
from atoll.catalog.prices import PriceTable
from atoll.core.errors import InputError, UnknownNameError
from atoll.core.ids import format_node_type, parse_node_type, slug
from atoll.plan.files.fleet_schema import CloudSpec, FleetDocument
from atoll.plan.plan import Market
from atoll.plan.problem import Offer, slices_of

_DEFAULT = "default"


def offers_of(document: FleetDocument, catalog: Catalog) -> tuple[Offer, ...]:
    """Return every offer of the pool; a written-out one replaces what `cloud` says of its nodes."""
    if document.content.pool is None:
        raise document.error(
            "there are no nodes", hint="add a 'pool' to rent from, or a 'cluster' that is there"
        )
    offers = {offer.key: offer for offer in _cloud(document, catalog)}
    offers |= {offer.key: offer for offer in _owned_offers(document, catalog)}
    written: dict[tuple[str, str, Market], int] = {}
    for index, offer in enumerate(_explicit_offers(document, catalog)):
        if offer.key in written:
            raise document.error(
                f"{' '.join(offer.key)} is offered twice",
                "pool",
                "offers",
                index,
                hint=f"join it with entry {written[offer.key]} of the list",
            )
        written[offer.key] = index
        # What is offered in shares is the machine that may be priced whole above.
        whole = str(parse_node_type(offer.node_type).whole)
        if (offer.region, whole, offer.market) not in written:
            offers.pop((offer.region, whole, offer.market), None)
        offers[offer.key] = offer
    if not offers:
        raise document.error("the pool is empty", "pool", hint="add cloud, owned or offers")
    return tuple(offers.values())


def with_cores(
    document: FleetDocument, catalog: Catalog, offers: Iterable[Offer]
) -> tuple[Offer, ...]:
    """Return offers with the CPU cores of their machines, as stated or as their seller says."""
    known = {
        (row.place, row.node_type, row.instance): row.vcpus
        for row in catalog.prices
        if row.vcpus is not None
    }
    found = []
    for offer in offers:
        cores = offer.cores or known.get((offer.region, offer.node_type, offer.instance))
        if cores is None:
            raise document.error(
                f"how many CPU cores a machine {offer.node_type} in {offer.region} has is not known",
                "pool",
                hint="add 'cores' to its entry under pool.owned or pool.offers, or leave out "
                "'cores' of services",
            )
        found.append(offer.model_copy(update={"cores": cores}))
    return tuple(found)


# Rented


def _cloud(document: FleetDocument, catalog: Catalog) -> Iterator[Offer]:
    pool = document.content.pool
    cloud = None if pool is None else pool.cloud
    if cloud is None:
        return
    here = ("pool", "cloud")
    if not (cloud.on_demand or cloud.spot):
        raise document.error(
            "neither on demand nor spot", *here, "on_demand", hint="allow one of them"
        )
    prices = catalog.prices
    places = tuple(dict.fromkeys(_places(document, prices, cloud)))
    wanted = tuple(dict.fromkeys(_requested_types(document, catalog, cloud, places)))
    room = _Room(document, catalog, (*here, "available"), cloud.available)
    spot_room = (
        room
        if cloud.spot_available is None
        else _Room(document, catalog, (*here, "spot_available"), cloud.spot_available)
    )
    for place in places:
        for kind in wanted:
            for market, rooms in (("on-demand", room), ("spot", spot_room)):
                spot = market == "spot"
                if not (cloud.spot if spot else cloud.on_demand):
                    continue
                price = prices.cheapest(place, kind, spot=spot, include_imputed=cloud.imputed)
                usd = None if price is None else price.cost(spot=spot)
                if price is not None and usd is not None:
                    yield Offer(
                        region=place,
                        node_type=kind,
                        market="spot" if spot else "on-demand",
                        available=rooms.of(kind),
                        usd_per_hour=usd,
                        instance=price.instance,
                        whole=cloud.whole or not can_be_cut(catalog, kind),
                    )


def _places(document: FleetDocument, prices: PriceTable, cloud: CloudSpec) -> Iterator[str]:
    """Yield the canonical places of the regions asked for; a cloud's name means all of its regions."""
    for index, region in enumerate(cloud.regions):
        with document.at("pool", "cloud", "regions", index):
            places = sorted({row.place for row in prices if row.is_in(region)})
            if not places:
                raise UnknownNameError("region", region, prices.regions)
            for place in places:
                slug(place)
        yield from places


def _requested_types(
    document: FleetDocument, catalog: Catalog, cloud: CloudSpec, places: tuple[str, ...]
) -> Iterator[str]:
    """Yield the canonical node types asked for; each must be sold somewhere."""
    sold = {
        row.node_type
        for place in places
        for row in catalog.prices.query(region=place, include_imputed=cloud.imputed)
    }
    everything = cloud.gpus is None and cloud.node_types is None
    if everything:
        yield from sorted(sold)
    for index, name in enumerate(cloud.gpus or ()):
        with document.at("pool", "cloud", "gpus", index):
            if ":" in name:
                raise InputError(f"{name!r} is a node type", hint="move it to 'node_types'")
            gpu = catalog.gpu(name).name
            kinds = sorted(kind for kind in sold if parse_node_type(kind).gpu == gpu)
            if not kinds:
                raise InputError(f"no {gpu} is sold there", hint=_sellers(catalog, gpu))
        yield from kinds
    for index, name in enumerate(cloud.node_types or ()):
        with document.at("pool", "cloud", "node_types", index):
            kind = catalog.node(name).id
            if kind not in sold:
                raise InputError(f"no {kind} is sold there", hint=_sellers(catalog, kind))
        yield kind


def _sellers(catalog: Catalog, name: str) -> str:
    """Say who sells a GPU type or node type."""
    rows = [
        row
        for row in catalog.prices.query(include_imputed=True)
        if name in (row.node_type, row.gpu)
    ]
    offered = sorted({row.place for row in rows if row.offered})
    if offered:
        imputed = "; or set 'imputed: true'" if len(offered) < len({r.place for r in rows}) else ""
        return f"sold in {', '.join(offered)}{imputed}"
    return "set 'imputed: true'" if rows else "add its price to the catalog, or leave it out"


class _Room:
    """How many nodes of a type can be had: by node type, by GPU type, or by default."""

    def __init__(
        self,
        document: FleetDocument,
        catalog: Catalog,
        here: tuple[str, ...],
        counts: int | dict[str, int],
    ) -> None:
        self._counts: dict[str, int] = {}
        self._otherwise: int = CloudSpec.model_fields["available"].default
        if isinstance(counts, int):
            self._otherwise = counts
            return
        for name, count in counts.items():
            if name == _DEFAULT:
                self._otherwise = count
                continue
            with document.at(*here, name):
                known = catalog.node(name).id if ":" in name else catalog.gpu(name).name
                if known in self._counts:
                    raise InputError(f"{known} is given twice", hint="leave one of them out")
                self._counts[known] = count

    def of(self, node_type: str) -> int:
        """Return the most specific count that is given."""
        by_gpu = self._counts.get(parse_node_type(node_type).gpu, self._otherwise)
        return self._counts.get(node_type, by_gpu)


# Owned and written out


def _owned_offers(document: FleetDocument, catalog: Catalog) -> Iterator[Offer]:
    pool = document.content.pool
    for region, machines in ((pool and pool.owned) or {}).items():
        with document.at("pool", "owned", region):
            slug(region)
        kinds: set[str] = set()
        for name, entry in machines.items():
            with document.at("pool", "owned", region, name):
                kind = machine_type(catalog, name)
                if kind in kinds:
                    raise InputError(f"{kind} is given twice", hint="add them up in one line")
            kinds.add(kind)
            if not isinstance(entry, int):
                with document.at("pool", "owned", region, name, "shares"):
                    kind = _in_shares(catalog, kind, entry.shares, entry.whole)
            yield Offer(
                region=region,
                node_type=kind,
                market="owned",
                available=entry if isinstance(entry, int) else entry.count,
                usd_per_hour=0.0 if isinstance(entry, int) else entry.usd_per_hour,
                whole=(not isinstance(entry, int) and entry.whole) or not can_be_cut(catalog, kind),
                cores=None if isinstance(entry, int) else entry.cores,
            )


def _explicit_offers(document: FleetDocument, catalog: Catalog) -> Iterator[Offer]:
    pool = document.content.pool
    for index, entry in enumerate((pool and pool.offers) or ()):
        here = ("pool", "offers", index)
        with document.at(*here, "region"):
            slug(entry.region)
        with document.at(*here, "node_type"):
            kind = machine_type(catalog, entry.node_type)
        with document.at(*here, "shares"):
            kind = _in_shares(catalog, kind, entry.shares, entry.whole)
        whole = entry.whole or not can_be_cut(catalog, kind)
        fields = entry.model_dump(exclude={"shares"})
        yield Offer.parse({**fields, "node_type": kind, "whole": whole})


def machine_type(catalog: Catalog, name: str) -> str:
    """Return the canonical name of a machine's type; shares of its GPUs are told beside it."""
    node = parse_node_type(catalog.node(name).id)
    if node.shares > 1:
        raise InputError(
            f"{name!r} names a share of a GPU",
            hint=f"write {node.whole_gpu}:COUNT, and 'shares: {node.shares}' in its entry",
        )
    return str(node)


def _in_shares(catalog: Catalog, kind: str, shares: int, whole: bool) -> str:
    """Return a machine's type with its GPUs in so many shares."""
    if shares == 1:
        return kind
    if whole:
        raise InputError(f"{kind} in shares, and never cut", hint="leave out 'shares' or 'whole'")
    return catalog.node(str(parse_node_type(kind).in_shares(shares))).id


def can_be_cut(catalog: Catalog, node_type: str) -> bool:
    """Return whether the catalog knows every slice of a machine; of one's own GPU types it may not."""
    gpu, count = parse_node_type(node_type)
    try:
        for size in slices_of(count):
            catalog.node(format_node_type(gpu, size))
    except UnknownNameError:
        return False
    return True
