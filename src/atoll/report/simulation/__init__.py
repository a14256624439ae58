"""Simulated runs for people: tables for the terminal, a page and a notebook's cell.

    simulation_tables, page runs of plain llms (`sim.sim_result.SimReport`)
    task_tables, task_page  runs with any-to-any services (`sim.tasks.mixed_report.MixedReport`)
    plots_svg               distributions, lines over time, and a map of busy nodes

Callers use `api.fleet_report`, which picks one of them. May import what the rest of `report` may.
"""
