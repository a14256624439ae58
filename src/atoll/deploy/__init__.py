"""Deployers: instances as processes of this machine, Slurm or Ray jobs, pods, rented or joined machines.

A target is where instances run; a deployer is the code behind it. Start reading at `target`.

    target         the interface: orders in, statuses out
    target_table   which targets there are; a new one is a module or folder and a field there
    terms          orders of an older controller are refused
    local/, slurm/, kubernetes/, ray/, skypilot.py, joined/   the deployers
    commands/      what the nodes of an instance run

May import `runtime`, `fabric`, `plan` and below; knows nothing of `control`.
"""
