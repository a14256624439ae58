"""Graph server: OpenAI's endpoints for tasks (graphs of components) that run in executors.

A request, step by step:

1. `graph_server` finds its endpoint and service, and reads it strictly (`chat_endpoint`, `speech_endpoint`,
   `transcription_endpoint`, `image_endpoint`, `embedding_endpoint`; `request_fields`, `form_data`): a field
   that would change the answer, and cannot, is refused by name.
2. `intake` decodes its media in threads, within limits, and stores them as handles.
3. `path_router` assigns its class, a path of the plan and an executor for each step, all at once.
4. Its task (`graph_services`) runs; `dispatch` sends every invocation to its executor (`executor_links`);
   `recovery` and `request_leases` decide what happens when one is lost: try another, resume, or make an
   input again.
5. The answer goes out as it comes (`graph_request`), what OpenAI's shape does not know in a field of its own
   (`answer_shapes`); `request_usage` counts, `request_traces` shows where
   time went.
6. Everything it held is released, however it ended.

Code that decides does no I/O: `path_router`, `recovery`, `request_leases`. No model runs in this process.
Imports `tasks`, `routing`, `runtime.executor`, `runtime.media` and `runtime.http`, and of `runtime.instance`
how deep tools may be nested; nothing of the gateway.
"""
