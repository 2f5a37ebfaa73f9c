"""Models on this Mac: their names, the Hub's cache, what is complete, and how files come here.

Nothing here knows of an agent or a cluster.
"""
