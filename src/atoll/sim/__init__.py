"""Discrete-event simulator: would a plan hold under a workload?"""
