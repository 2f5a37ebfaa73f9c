"""HTTP: from a client's bytes to a request for text, and from its answer back to bytes.

Read `app` (routes), `adapter` (interface of a dialect), one of `dialects`, and `generation`, which answers
a request for all of them; `streaming` sends the answer. `backend` is the interface to the agent. `guard` and
`api_keys` decide who may use the endpoint that `endpoint` opens; `server` has its connections.
"""
