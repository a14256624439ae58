"""What people look at: terminal tables, HTML pages, SVG drawings and charts.

Knows problems, plans and the results of simulations; the command line and notebooks use it.
"""
