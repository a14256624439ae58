"""Executors: processes that run components of any-to-any models for whoever invokes them.

Begin with `executor_process` (run with `python -m` and `--config FILE`) and `executor_server`, which
takes invocations; `executor_client` is the other end.

    executor_config, executor_caller, workers    settings, one caller, components at work
    executor_messages, executor_wire             messages, and their bytes
    arrays, spares, store, fetching, outputs     arrays as files that processes share, held by leases
    smollm2, transformers_chat, openai_chat      components: Atoll's engine, transformers, somebody's server
    executor_pages, figures                      health, metrics, counters

May import `components`, `tasks`, `engine`, `telemetry`, `core`, and of `runtime` its HTTP, and how an
instance reads and writes chats.
"""
