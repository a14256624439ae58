"""Models on clusters whose machines are given: flows, Helix's figures, sustained throughput."""
