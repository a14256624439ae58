"""HTTP/1.1 for every server and client of Atoll, on asyncio.

Begin with `http_server`: connections of clients, and what an application behind them has to be. The modules:

    http_request    a request as it comes and as it was read, and the limits on it
    http_server     connections of clients; `answering` writes what they are told
    handlers        an application made of one async function
    websocket       WebSocket on a connection of a server
    program         a server as a program: configuration, event loop, signals
    upstream        kept connections to backends
    http_client     one request, one answer
    listen_address  whether an address can be listened on
    process_memory  large pieces of memory back to the machine

Imports `core` and `runtime.openai` (for the shape of errors), and nothing else of Atoll.
"""
