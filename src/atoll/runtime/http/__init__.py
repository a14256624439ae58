"""HTTP/1.1, once: the server that clients reach, connections to upstreams, a small client, the event loop."""
