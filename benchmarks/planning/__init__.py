"""Rented fleets: templates, allocation, promises, certainty, the choice of models."""
