"""Models in parts: planning, simulating, running and killing them, and spoken questions."""
