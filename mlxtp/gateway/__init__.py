"""Client requests in, confirmed tokens out, across epochs.

`gateway.Gateway` keeps each open `request` and gives it to rank 0, here or by way of `remote_backend`.
`admission` refuses what would be too much, and `retry_policy` sends a request again after its group failed.
"""
