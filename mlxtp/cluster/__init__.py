"""Members, the coordinator, deployments and assignments; control links between agents.

Read `node.ClusterNode` (this Mac among the others) and `cluster_state` (what all agree on) first.
`control_port` opens `links`, after an `introduction`. `membership` knows who is present, `leadership` who
coordinates; `place` maps groups to Macs, and `reconcile` has an owner's next action. `state_changes` makes
and receives changes of members and deployments, `state_file` keeps them, `authority` signs.
"""
