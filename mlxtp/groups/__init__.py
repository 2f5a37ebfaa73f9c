"""An agent's side of a group: epochs, rank processes here and on other Macs, recovery.

`reconciler` decides in each round, and `controller` makes plans with `placer`. `lifecycle` runs
the epochs: a `process_group` of `ranks`, started from the `warm_pool`, with a model that `loading` brings up.
`status` has what users see. `hosted_rank` runs ranks here for groups that other agents own.
"""
