"""What pages and programs ask of a gateway under `/atoll/v1/`, each caller as its role allows.

    caller          who asks, and which keys are its own
    route           a request that is answered, for whom and by what
    gate            the way to the database of keys and usage
    console         the table of all of them; finds the caller, the route, and answers
    administration  for those who run the gateway: status, fabric, backends, routes, traffic
    me              who asks
    keys            make, change, revoke, list
    usage           sums, as JSON and CSV

`docs/reference/http.md` is the contract.
"""
