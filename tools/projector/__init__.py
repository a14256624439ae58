"""Trains the projector that lets SmolLM2 see; README.md says how."""
