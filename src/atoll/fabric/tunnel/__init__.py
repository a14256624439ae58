"""Requests to workers that have no open port, over the fabric's own transport.

`TunnelClient` is the side of a gateway, `TunnelServer` that of a node that serves. Between one caller and one
worker there is one channel (`channel`): keys agreed on by both certificates (`handshake`), packets that
are numbered, acknowledged and sent again when a hub was lost, and in them the frames of many streams
(`tunnel_frames`). Each stream has its own credit, so that a slow reader stops nobody else.

Start reading at `tunnel_client` and `tunnel_server`; `call` and `incoming` are a request on either side.
"""
