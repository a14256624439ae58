"""Fabrics: how quickly members agree, what the tunnel costs, nodes that come and go."""
