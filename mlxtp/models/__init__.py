"""From the name of a model to its files on this disk.

In reading order: `manifest` (its files), `hub_cache` (the disk), `hub_client` and `peer_copy` (the sources),
`download`, `inspect` (names, shapes, lists), `model_transfer` (reports of all members) and `transfers`
(downloads of a cluster), `local_model` (the wanted models on this Mac), `self_test`.
"""
