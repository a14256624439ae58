"""Simulation of any-to-any models: requests that pass several parts, on executors of their own or shared."""
