"""A plan on this machine: its nodes as processes, its instances as endpoints, a gateway in front.

Begin with `local_endpoints`, then `local_fleet`.

    weights          which weights a plan needs, and whether these are them
    placing          which endpoints, with which layer ranges of the model that is served here
    instance_runner  what runs an instance here: an engine on GPUs, or cores, and why
    cores            which cores each process gets
    local_endpoints  configurations and endpoints, through `runtime.endpoints`
    local_fleet      starting, watching and stopping all of it
    fleet_state      a file for each running fleet, for `atoll status`

The other modules measure: `layer_profile` a range of layers; `component_profile` (with `component_sections`
and `component_modules`) and `executor_profile` parts of any-to-any models; `server_profile` and `load_probes`
servers.
"""
