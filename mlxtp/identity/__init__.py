"""This Mac's keys and membership, and the exchange by which it joins a cluster.

Read `store.Store` (what is on disk, by `private_files`) first. `join_protocol` has the tokens, and both ends
of the exchange without I/O. `join_network.enter` finds a member and runs it.
"""
