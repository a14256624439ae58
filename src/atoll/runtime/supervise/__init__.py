"""Processes that are kept running: when to start and stop them, and how none outlives its parent.

Begin with `agent`.

    agent               keeps the engine processes of a machine running
    supervision         what to do with one process: decisions only
    supervised_process  a command, and starting it under a supervisor
    supervisor          the program around one process: ends it with its parent, limits its log
    fork_server         a program that has loaded the engine and forks it, so that starts are fast
    fork_client         the agent's side of a fork server

Imports `core` only, except that a fork server loads the engine beforehand.
"""
