"""`/v1/realtime`: speech in and out over a WebSocket, with OpenAI's events.

A session runs where its WebSocket ends, in a gateway or a graph server, and asks that same server for its
answers as any client would: one chat with sound in and out a turn. So keys, quotas, limits, usage, routes and
retries are those of `/v1/chat/completions`, and nothing of a session outlives its connection.

    realtime_events     what clients say, checked, and how servers say it
    turn_detection      when somebody begins and ends to speak
    realtime_session    a session: sound that is held, the conversation, the answer under way
    realtime_host       sessions of one server, and how many there may be (`realtime_limits`)

Imports `components` (Silero), `runtime.http` and `runtime.openai`.
"""
