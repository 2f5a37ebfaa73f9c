"""Client requests in, confirmed tokens out, across epochs.

`gateway.Gateway` takes what `admission` does not refuse. Its `dispatcher` keeps each open `request` and gives
it to rank 0, here or by way of `remote_backend`; after a failure it gives it to the next group.
"""
