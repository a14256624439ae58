"""Machines that joined a fleet's fabric as a target: each runs instances under its own agent.

joined_settings   how it is set, and how it is opened
joined_deployer   start, drain, stop and list over all machines; start reading here (decides only)
machine_request   what a machine is asked, what it answers, and which weights it may be told of
machine_host      the machine's side: a local target for instances, told by signed orders
machine_fabric    how machines are found and asked over the fabric
"""
