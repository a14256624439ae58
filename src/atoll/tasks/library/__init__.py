"""Tasks that come with Atoll: units for its components, and the tasks behind its endpoints."""
