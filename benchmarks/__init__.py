"""Benchmarks: `make bench`, or `python -m benchmarks [--quick] [--only CASE] [--json FILE] [--no-docs]`.

`measures.py` lists every row by its stable name; each other module that has a `measure` is one case.
`RESULTS.md` has the rows of the last full run, the peer of each, and the method.
"""
