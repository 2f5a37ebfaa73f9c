"""This Mac's keys and membership, and the exchange by which it joins a cluster.

Read `store.Store` (what is on disk, by `private_files`) and `join_token` first. `join_protocol` has both ends
of the exchange without I/O. `join_network.enter` finds a member and runs it.
"""
