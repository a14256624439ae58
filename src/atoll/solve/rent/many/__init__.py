"""Renting where services are so many that programs over all their instances take too long.

fluid_program   the relaxation over parts of instances: one linear program, and its prices
region_program  whole instances in one region, by what they are worth there
region_dive     region after region from the relaxation
region_repair   regions anew, for those who are served worst
"""
