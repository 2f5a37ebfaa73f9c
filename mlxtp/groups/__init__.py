"""An agent's side of groups: epochs, rank processes here and on other Macs, recovery.

`coordinator` assigns groups to Macs where this node leads, and `groups` has all that are known. Each `group`
decides in each round by what is known of it (`scope`), and its `controller` forms what is assigned.
`lifecycle` runs the epochs: a `process_group` of `ranks`, started from the `warm_pool`, with a model that
`loading` brings up. `status` has what users see. `hosted_rank` runs ranks here for groups of other agents.
"""
