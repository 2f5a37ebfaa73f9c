"""Benchmarks: `make bench`, or `python -m benchmarks [--quick] [--only CASE] [--json FILE] [--no-docs]`.

`measures.py` lists every row by its stable name; each other module that has a `measure` is one case.
`docs/performance.md` has the peer of each row, and the method.
"""
