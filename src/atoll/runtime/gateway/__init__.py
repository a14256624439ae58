"""The gateway: OpenAI's API in front of many instances, with streams that outlive them.

    settings  limits, deadlines, health checks
    http      the side clients see
    upstream  the side backends see
    relay     one request on its way, over as many backends as it takes
    events    the events of a stream, and the journal of what a client has
    faults    what a client is told when no backend could answer
    resume    how a stream that broke off goes on elsewhere
    health    watching backends
    admin     what the gateway answers by itself
    openapi   its description of itself
    watch     a configuration file that changes
    app       all of it together

Needs the extra `serve`.
"""

from atoll.runtime.gateway.app import Gateway
from atoll.runtime.gateway.settings import GatewaySettings

__all__ = ["Gateway", "GatewaySettings"]
