"""Tasks that come with Atoll: units for its components, and the tasks behind its endpoints.

Begin with `assistant`, which hears, sees, thinks and speaks: it uses most of the others.

    unit_tasks                  one unit task for each kind of component
    shapes                      requests and answers of these tasks
    speech, transcription, drawing, embedding
                                tasks of one kind of output

May import `tasks` and `core`.
"""
