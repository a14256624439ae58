"""The gateway: OpenAI's API in front of many instances, with streams that outlive them.

Begin at the top of `app`: it tells what happens to a request, in order. The modules:

    app, settings, standalone   all of it together; limits and deadlines; a process of its own
    relay                       one request for a model (media_relay: sound and pictures; token_relay: tokens)
    service_proxy               one request for a service that is no model
    attempt, queue, poison      choose a backend, send, let go; wait for room; requests that kill backends
    prefill_leg                 the prompt of a request that one backend computes and another decodes
    requirements, chooser       which backend serves a request with a key, a policy or a conversation
    served_choices              names that several models answer to
    backend_answer, events      what a backend said so far, and what the client has of it
    resume, kept_streams        how a stream that broke off goes on elsewhere; at another gateway
    content, form, cors         checks of what clients send
    faults                      errors for clients whom no backend could answer
    usage_writer, traffic_tally records of requests that ended; sums for a controller
    request_kind                what a request brings and wants, for those sums
    gateway_metrics, series     what Prometheus reads
    health                      asks backends how they are
    gateway_pages, openapi      what the gateway answers by itself
    admin                       the listeners of those who run it
    console, dialects           requests under /atoll/v1/; other APIs than chat

Its parts do not import `app`. May import `http`, `pool`, `media`, `accounts`. Needs the extra `serve`.
"""

from atoll.runtime.gateway.app import Gateway
from atoll.runtime.gateway.settings import GatewaySettings

__all__ = ["Gateway", "GatewaySettings"]
