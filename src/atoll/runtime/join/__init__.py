"""Joining a fabric: a machine offers what it has, and an engine on it what it serves.

options     everything a node is told
hardware    which GPUs and how much memory are here
command     what an engine's command line gives away: its port, its model, its precision
offers      what a server says it serves
watcher     is it well, what does it serve now
load        how busy it is
deadline    when this node ends: Slurm, spot notices, the user
life        what to announce: pure
bridge      requests from the tunnel to the engine's own address
assignment  an operator asks a waiting node to serve a model: what may be asked, who may ask
order_receiver  where a node takes such orders
engines     what is to be started
node        the whole life of a node
"""
