"""The parts of `atoll demo` that are no text: a fleet kept by a controller, and clients that ask.

    controlled_fleet  DemoFleet: hub, gateway, controller and instances of one small model on this machine
    shared_gpu        a plan for cores on shares of a GPU that is here
    serving_beside    serve a plan while an event loop does something else
    asking            chat, speech and transcription over HTTP, as any client of OpenAI's API does it

May import what `atoll.api` may. The steps that are told stand in `atoll.cli.demo`.
"""
