"""The pipeline-stage engine: a layer range of a transformer, paged KV, continuous batching.

Begin with `scheduler` (takes requests, streams tokens, survives its nodes) and `node` (a process that holds
one layer range); their decisions, without sockets, are `scheduler_core` and `node_core`.

    batcher, batch_pacing, kv         batches of a node, decode groups under way, the pool of KV blocks
    model_stage, attention, fused     layers of a model over paged KV
    matrix, matrix_tiles, matrix_layers
                                      weights in 8 and 4 bits, and layers over them
    triton_ops, torch_ops, weight_packing
                                      fast operations for GPUs and for CPUs
    step_layout, cuda_graphs, compile_count
                                      steps of fixed sizes, captured before a node is ready
    rank_cut, rank_group, ranked_stage, rank_crew, rank_process
                                      several GPUs a node: parts of tensors, what ranks do together
    token_sampling, guidance          the next token, and answers that must match a schema
    engine_messages, frames, mailbox  messages between processes
    text, prompts, embeds             tokens and text, conversations, vectors in prompts
    weights/                          where weights come from

May import `core` and the decisions of `routing`. Importing this package loads no torch and no ZeroMQ; the
modules that need them say so.
"""
