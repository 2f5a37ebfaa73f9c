"""Client requests in, confirmed tokens out, across epochs.

`gateway.Gateway` keeps each open `request` and gives it to rank 0, here or by way of `remote_backend`; after
a failure it gives it to the next group. `admission` refuses what would be too much.
"""
