"""Bytes and messages: what travels between processes. Pure, except the two shells.

Read `messages` (links of ranks), `cluster_messages` (links of agents) and `protocol` (their order) first.
`session.Session` is one end of a link, made of `frames`, `codecs` and `protocol`. `blocking` is its shell for
threads, `streams` the one for asyncio. `tls` and `certificates` say who may connect.
"""
