"""What people look at: terminal tables, HTML pages, notebook cells, SVG drawings and charts.

Knows problems, plans and the results of simulations; the command line and notebooks use it. `draw_*` makes
what a terminal shows, `render_*_page` one HTML file, `render_*_fragment` one HTML element for a notebook.

    plan/show.py          any plan, on rented nodes or on a fixed cluster
    simulation/           a simulated run: page.py and tables.py
    promises.py           which promises are kept, in a line for each service
    explanation.py        what binds a plan and what would help
    diff.py               what changes from plan to plan
    charts.py             curves, in the terminal, as PNG or HTML; trace.py and serving_templates.py use it
    render.py, pages/     jinja2 templates and how they are filled
    terminal.py           consoles, tables, JSON
"""
