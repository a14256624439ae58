"""A federation: nodes of several sites find each other, trust each other by certificate, and talk.

    records     what the registry holds of a session, and the order that merges it
    registry    the replicated map as a pure core: events in, effects out, time is a parameter
                (with effects, replica, refusals, and sync and exchange: how two copies compare)
    queries     which nodes have what one asks for
    keys        names of slots and sessions, and who may write which key
    identity    certificates; authority issues them, access is a member's way in, trust what is believed
    fabric      the driver of the registry, what other packages use (with peers, load, quota, settings)
    link        zenoh and the event loop (with wire, its configuration, and forward, HTTP proxies)
    hub         the process that others dial
    tunnel      requests and answers over the same transport, sealed

Start reading at `records` and `registry`.
"""
