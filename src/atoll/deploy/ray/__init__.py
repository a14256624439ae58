"""The Ray target: instances as jobs of a Ray or KubeRay cluster, each with a placement group.

ray_target      the row in the table of targets; ray_settings: its fields
ray_deployer    start, drain, stop and list; start reading here
ray_client      the few requests that are made to the cluster's head, over HTTP
ray_machines    machines with GPUs as offers
ray_package     what an instance's job is given: its order, and its secrets
ray_job         the job itself, in the cluster: places the nodes and says how the instance is
ray_node        runs the command of one node, as an actor
ray_server      runs a server whose workers Ray starts in the bundles of the instance
ray_stop        ends a job's nodes now, as a job of its own

Only `ray_job`, `ray_server` and `ray_stop` import `ray`, and they run in the cluster.
"""
