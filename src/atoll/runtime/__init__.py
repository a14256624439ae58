"""Processes that answer requests: the gateway in front, instances behind it, agents that keep them up.

Begin with `gateway`: the top of `gateway.app` tells what happens to a request. The packages:

    openai       OpenAI's API: requests as far as they are checked, errors
    http         servers and clients
    gateway      between clients and backends; `pool` its backends, `accounts` its keys and ledger
    federation   a gateway whose backends are the nodes of a fabric; `join` brings a machine into one
    instance     an endpoint of Atoll's stage engine
    graph_server endpoints of any-to-any models; `executor` runs their components
    media        pictures, sound and video from strangers
    realtime     speech in and out over a WebSocket
    supervise    processes that are kept running; `endpoints` those of a plan
    local        a plan on this machine; `task_fleet` one with executors

May import what stands below it (`engine`, `components`, `plan`, `fabric`, `telemetry`, `core`).
"""
