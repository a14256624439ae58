"""The dashboard: pages in the browser, and a small server that stands between them and Atoll's services.

server    the routes
sessions  who is logged in, and how often somebody may try
links     one-time links to log in with
trust     who is logged in by a reverse proxy's word
services  where gateway and planner are, and how they are asked
proxy     requests of pages, passed on with the session's credentials
live      one connection to each service, told to every open page
static    the files of the pages
headers   what every answer says to browsers, and what of a request is passed on

It speaks HTTP to the gateway and to the planner, as `docs/reference/http.md` says, and knows nothing else of
Atoll: what it can do, other pages can.
"""
