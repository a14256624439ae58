"""What answers requests: the gateway in front, instances behind it, and the agents that keep them up."""
