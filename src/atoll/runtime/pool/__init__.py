"""The backends of a gateway: what each is, how it fares, which is next.

Begin with `member`, then `pool`.

    member            one backend: its configuration, its facts, its state
    backend_metadata  what a backend says of its processes and models, as JSON
    pool              all backends, by model
    rings             the order in which backends of a model are asked
    pairs             the same where some compute prompts for others
    outliers          when a backend is left alone for a while
    routes            weights and promises that a controller told
    policy            which nodes a key or a request accepts

Imports `engines`, `plan`, `routing` and `fabric.identity`; nothing of the gateway.
"""
