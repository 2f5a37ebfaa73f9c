"""From the name of a model to its files on this disk.

In reading order: `manifest` (its files), `hub_cache` (the disk), `hub_client` and `peer_copy` (the sources),
`download`, `inspect` (names, shapes, lists), `stored` (lists of all members), `holdings`, `model_transfer`
and `transfers` (downloads of a cluster), `local_model` (the wanted models on this Mac), `self_test`.
"""
