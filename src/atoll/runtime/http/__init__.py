"""HTTP/1.1, once.

server    connections of clients, and what an application behind them has to be
handlers  such an application of an async function
upstream  kept connections to backends
client    one request, one answer
listening whether an address can be listened on
loop      the event loop
"""
