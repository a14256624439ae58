"""The gateway: OpenAI's API in front of many instances, with streams that outlive them.

    settings  limits, deadlines, health checks
    http      the side clients see
    upstream  the side backends see
    attempts  finding a backend for a request, and another if that one fails
    relay     one request: what its backend says, what the client hears of it
    wishes    what is special about a request: key, policy, models, conversation
    choosing  which backend serves a special request, and why none does
    services  requests to services that are no models
    events    the events of a stream, and the journal of what a client has
    faults    what a client is told when no backend could answer
    resume    how a stream that broke off goes on elsewhere
    health    watching backends
    series    what is counted of the fabric, the tunnel, keys and decisions
    admin     what the gateway answers by itself
    openapi   its description of itself
    watch     a configuration file that changes
    app       all of it together

Needs the extra `serve`.
"""

from atoll.runtime.gateway.app import Gateway
from atoll.runtime.gateway.settings import GatewaySettings

__all__ = ["Gateway", "GatewaySettings"]
