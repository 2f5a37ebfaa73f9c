"""An agent's side of groups: epochs, rank processes on this and other Macs, recovery.

On the leading node, `coordinator` assigns groups to Macs. `groups` has all known groups. In each round, a
`group` decides from its `scope`, and its `controller` plans epochs for its assignment. `lifecycle` runs them:
a `process_group` of `ranks`, started from the `warm_pool`, with a model from `loading`. Users see `status`.
`hosted_rank` runs ranks for other agents' groups.
"""
