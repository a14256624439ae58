"""A gateway on a fabric: the nodes of the fabric are its backends.

Begin with `federation`, which does the rest for one gateway. The modules:

    members            what nodes say of themselves -> the backends of a pool
    upstreams          requests to nodes, through the tunnel or straight
    federation         both of them for one gateway
    fabric_view        what the console shows of the fabric
    federated_gateway  a whole gateway process (`atoll gateway`)

Stands on `fabric`, `runtime.gateway` and `runtime.pool`. Needs the extra `fabric`.
"""

from atoll.runtime.federation.federation import Federation

__all__ = ["Federation"]
