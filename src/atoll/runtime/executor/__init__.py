"""Executors: processes that run components of any-to-any models for whoever invokes them."""
