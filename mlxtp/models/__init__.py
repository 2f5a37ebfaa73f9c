"""From the name of a model to its files on this disk.

In reading order: `manifest` (its files), `hub_cache` (the disk), `hub_client` and `peer_copy` (the sources),
`download`, `inspect` (names, shapes, lists), `transfers` (downloads of a cluster), `local_model` and
`selection` (the desired model), `model_queue` (loading on request), `self_test`.
"""
