"""Bytes and messages between processes. Pure, except the two shells.

Read `messages` (links of ranks), `cluster_messages` (links of agents) and `protocol` (their order) first.
`session.Session` is one end of a link, made of `frames`, `codecs` and `protocol`. `blocking` is its shell for
threads, and `streams` for asyncio. `tls` and `certificates` decide who may connect.
"""
