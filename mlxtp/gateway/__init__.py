"""Client requests in, confirmed tokens out, across epochs.

`gateway.Gateway` takes what `admission` does not refuse. Each deployment has a `dispatcher`, which keeps the
open requests (`request`). It chooses a group (`ready_groups`, `routing`) and sends the request to rank 0 by
the backend that `groups` gave it; after a failure, to another group or to the next one.
"""
