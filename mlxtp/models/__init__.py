"""From the name of a model to its files on this disk.

Read `manifest` (a model's files), `hub_cache` (the disk), `hub_client` and `peer_copy` (the sources) and
`download`. Then `inspect` (names, shapes, lists), `model_transfer` (reports of all members), `transfers`
(downloads of a cluster), `local_model` (the wanted models on this Mac) and `self_test`.
"""
