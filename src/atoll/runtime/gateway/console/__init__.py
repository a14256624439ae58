"""The console: requests of pages and programs to a gateway under `/atoll/v1/`, each as its role allows.

Begin with `console`: the table of all requests; it finds the caller and the route, and answers. The modules:

    console_caller  who asks, and which keys are its own
    route           a request that is answered, for whom and by what
    gate            the way to the database of keys and usage
    administration  for those who run the gateway: status, fabric, backends, routes, traffic
    key_requests    make, change, revoke, list keys
    usage_requests  sums, as JSON and CSV
    watching        those who watch: me, snapshot, live, models, machines; machines drained (`draining`)
    snapshot        how the gateway stands; made once, however many ask
    live_feed       snapshots as events
    shown_models    models with who serves them
    shown_machines  nodes and backends, and the pipelines over them
    alarms          what is wrong, and what to do
    view            the gateway as all of these see it

`docs/reference/http.md` is the contract. Imports nothing of the gateway's way of a request.
"""
