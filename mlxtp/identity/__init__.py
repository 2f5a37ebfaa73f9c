"""This Mac's keys and membership, and the exchange that admits it to a cluster.

Read `store.Store` first: the files on disk, written by `private_files`. `join_protocol` has the tokens, and
both ends of the exchange without I/O. `join_network.enter` finds a member and runs the exchange.
"""
