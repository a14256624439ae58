"""The local target: instances as processes of this machine, each under a daemon of its own.

local_settings   how it is set, and how it is opened
local_deployer   start, drain, stop and list, by files in a folder; start reading here
daemon           the process that keeps the processes of one instance, and outlives its controller
gpu_slots        which GPUs are free, and who holds the others (decides only)
local_placement  which instances of a plan stand on GPUs here, for `atoll serve` (decides only)
"""
