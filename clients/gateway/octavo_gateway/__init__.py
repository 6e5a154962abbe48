"""OpenAI's HTTP API in front of a scheduler: a client of `octavo.v1` like any other.

    octavo gateway --listen 127.0.0.1:8000 --target 127.0.0.1:50051

A request goes one way: `app` finds its endpoint, `exchange` reads it, `schema` checks its
types, `completions` or `chat` translate it, `generation` calls the scheduler, and the
same two modules write the answer. Bounds are the scheduler's to check, in one place;
`errors` gives its refusals OpenAI's form and names.
"""
