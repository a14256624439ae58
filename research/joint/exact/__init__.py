"""The joint problem solved to a proven optimum."""
