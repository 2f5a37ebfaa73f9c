"""The rank process: the only folder that computes with MLX.

Read `scheduler`, `decode_loop` (rank 0) and `serve_loop` (every other rank) first. `worker` is the process,
`group` has the collectives, `executor` carries out commands, and `runner` runs forwards over a `batch`.
"""
