"""Members, the coordinator, deployments and assignments; control links between agents.

Read `node.ClusterNode` (this Mac in the cluster) and `cluster_state` (the shared state) first. `control_port`
opens `links`, after an `introduction`. `membership` judges presence, and `leadership` finds the coordinator;
`place` maps groups to Macs, and `reconcile` has an owner's next action. `state_changes` makes and receives
changes of members and deployments, `state_file` keeps them, and `authority` hands over the signing key.
"""
