"""The front: OpenAI's endpoints for tasks whose components run in executors.

A request, step by step:

1. `server` finds its endpoint and service, and reads it strictly (`chat`, `spoken`, `transcriptions`,
   `images`, `embeddings`; `fields`, `forms`): what would change the answer and cannot is refused by name.
2. `intake` decodes what it brings in threads, within bounds, and stores it as handles.
3. `dealing` gives it its way: class, path of the plan, executor of each step; all of it when it comes.
4. Its task (`services`) runs; `dispatch` sends every invocation to its executor (`links`), and `recovery`,
   `progress` and `leases` say what happens when one is lost: elsewhere, resumed, or an input made again.
5. The answer goes out as it comes (`exchange`); `usage` counts, `traces` shows where time went.
6. Whatever it held is released, however it ended.

What decides does no I/O: `dealing`, `recovery`, `progress`, `leases`. No model runs in this process.
"""
