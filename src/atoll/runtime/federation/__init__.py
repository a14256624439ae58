"""A gateway on a fabric: the nodes of the fabric are its backends.

    members     what nodes say of themselves -> the backends of a pool
    upstreams   requests to nodes, through the tunnel or straight
    federation  both of them for one gateway
    service     a whole gateway process (`atoll gateway`)

Needs the extra `fabric`.
"""

from atoll.runtime.federation.federation import Federation

__all__ = ["Federation"]
