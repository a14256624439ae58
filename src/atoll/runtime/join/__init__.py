"""Joining a fabric: a machine offers what it has, and an engine on it what it serves.

Begin with `joined_node`: the whole life of a node.

    join_options    everything a node is told
    hardware        which GPUs and how much memory are here
    engine_command  reading an engine's command line: its port, its model, its precision
    engine_start    the engine of a node, prepared to start
    engine_load     how busy it is
    offers          what a server says it serves
    watcher         is it well, what does it serve now
    deadline        when this node ends: Slurm, spot notices, the user
    announcement    what to tell the fabric: decisions only
    bridge          requests from the tunnel to the engine's own address
    signed_orders   orders of operators: who may give them, and where a node takes them
    assignment      an operator's order to serve a model: what may be asked
    joined_node     all of it together

Imports `engines`, `fabric`, and of the runtime `endpoints`, `http` and `supervise`.
"""
