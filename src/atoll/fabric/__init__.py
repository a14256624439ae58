"""A federation: nodes of several sites find each other, trust each other by certificate, and talk.

    registry/    who is there: a replicated map as a pure core
    identity/    who is who: certificates, the authority that issues them, the tokens to join with
    transport/   the driver of the registry over zenoh: members, hubs, links
    tunnel/      requests and answers over the same transport, sealed

Start reading at `registry/records.py` and `registry/fabric_registry.py`. May import `core`, `catalog` and
`telemetry`; planning and simulation know nothing of it.
"""
