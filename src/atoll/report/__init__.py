"""Reports for people: terminal tables, HTML pages, notebook cells, SVG drawings and charts.

`draw_*` makes what a terminal shows, `render_*_page` one HTML file, `render_*_fragment` one HTML element for
a notebook. May import what plans and simulates, not `runtime`, `fabric` or `engine`.

    plan/show.py          any plan, on rented nodes or on a fixed cluster
    simulation/           a simulated run: page.py and simulation_tables.py
    promises.py           which promises are kept, in a line for each service
    explanation_report.py what binds a plan and what would help
    diff_report.py        what changes from plan to plan
    charts.py             curves, in the terminal, as PNG or HTML
    render.py, pages/     jinja2 templates and how they are filled
    terminal.py           consoles, tables, JSON
"""
