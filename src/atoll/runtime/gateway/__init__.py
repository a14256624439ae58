"""The gateway: OpenAI's API in front of many instances, with streams that outlive them.

What happens to a request, in order, stands at the top of `app`. The modules:

    app            all of it together
    settings       limits, deadlines, health checks, where to listen
    relay          one request for a model: what its backend says, what the client hears of it
    media_relay    one whose answer is sound, pictures or a transcript
    content        how much of each kind a request may bring, and from where
    form           the model in a form with a file
    answer         what one backend has said; the end is held back until it is all there
    service_proxy  one request for a service that is no model
    attempt        choosing a backend, connecting, sending, letting go
    retry          how often and how long another backend is looked for
    queue          requests that wait for a backend with room
    requirements   what is special about a request: key, policy, models, conversation
    chooser        which backend serves a special request, and why none does
    events         the events of a stream, and the journal of what a client has
    resume         how a stream that broke off goes on elsewhere
    faults         what a client is told when no backend could answer
    usage          what is written down of a request when it ends
    traffic        what is asked and kept, for a controller
    pages          what the gateway answers by itself
    console        what is asked under /atoll/v1/, by whom: keys, usage, administration
    context        what these two see of it
    admin          where those who run it ask: a Unix socket, a port for Prometheus
    openapi        its description of itself
    metrics        what it counts
    series         what is counted of the fabric, the tunnel, keys and decisions
    health         asking backends how they are
    standalone     a gateway process with a configuration file that is followed

Needs the extra `serve`.
"""

from atoll.runtime.gateway.app import Gateway
from atoll.runtime.gateway.settings import GatewaySettings

__all__ = ["Gateway", "GatewaySettings"]
