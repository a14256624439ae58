"""Instances of a plan as processes with an OpenAI endpoint; nothing here starts one, the agent does.

Begin with `endpoint`. `atoll.engines` says what an engine's command is, this package what belongs around it.

    endpoint        the types, and the endpoint of an engine that is one server
    stage_endpoint  Atoll's own engine: a process a node, and one that listens
    compile_cache   what engines compile as they start, kept for the next start
    probes          is a process ready, is it well: a real token
    devices         which machine and GPUs a node of a plan runs on

May import `engines`, `plan`, `engine`, and of the runtime `instance`, `pool`, `http` and `supervise`.
"""
