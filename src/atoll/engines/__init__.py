"""Engines that serve language models, one file an engine: all that Atoll has to know of each.

Begin with `engine`, then read `vllm`. Everybody else asks `table.find_engine(name)` for a property and never
compares names. A new engine is a file here that defines ENGINE, and its test; `table` finds it by itself.

    engine        the protocol, and the types it speaks in: layout, served model, command
    limits        limits an engine is started with; host time
    options       limits as options of a command, written and read back
    profile       cost beside the kernels and size of batches, by GPU
    table         all engines in the order of preference; look-ups
    vllm, sglang, llamacpp    servers that Atoll starts
    stage         Atoll's own engine (`atoll.engine`)
    graph_server  Atoll's server of any-to-any models
    openai, tgi   servers that others run
    none          kernels alone, to plan with

Imports `core` and `catalog` only, so that planning can read it; `runtime.endpoints` starts processes.
"""
