"""A federation: nodes of several sites find each other, trust each other by certificate, and talk.

    records     what the registry holds of a session, and the order that merges it
    registry    the replicated map as a pure core: events in, effects out, time is a parameter
    sync        how two replicas find out what the other lacks
    queries     which nodes have what one asks for
    keys        names of slots and sessions, and who may write which key
    identity, authority, access   certificates, who issues them, and how a member finds the hubs
    link, hub, fabric             the transport, its routers, and the driver of the registry
    tunnel      requests and answers over the same transport

Start reading at `records` and `registry`; `fabric.Fabric` is what other packages use.
"""
