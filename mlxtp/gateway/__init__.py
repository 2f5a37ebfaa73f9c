"""Client requests in, confirmed tokens out, across epochs.

`gateway.Gateway` takes the requests that `admission` accepts. Each deployment has a `dispatcher`, which keeps
the open requests (`request`). It chooses a group (`ready_groups`, `routing`) and sends the request to rank 0
through the backend from `groups`. After a failure it sends it to another group or to the next one.
"""
