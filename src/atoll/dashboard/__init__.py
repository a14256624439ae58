"""The dashboard, or console: pages in the browser, and the one API for them and for programs.

server       the routes of pages and sessions
console_api  the table of all requests of the API, whoever answers, and its description
sessions     who is logged in, and how often somebody may try
links        one-time links to log in with
trust        who is logged in by a reverse proxy's word
services     the gateway, asked over HTTP, and the planner, which is given to it
proxy        requests passed on with the session's credentials
sharing      answers that are the same for all pages of a role
live         gateway and planner listened to once, told to every open page
static       the files of the pages
headers      what every answer says to browsers, and what of a request is passed on

It asks the gateway over HTTP, as `docs/reference/http.md` says; the planner runs in its process, behind the
protocol `services.PlansFleets`. Of the rest of Atoll it knows nothing: `cli.console_inside` puts it together.
"""
