"""The choice problem solved to a proven optimum."""
