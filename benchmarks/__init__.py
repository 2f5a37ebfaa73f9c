"""Benchmarks: `make bench`, or `python -m benchmarks [--quick] [--only CASE] [--json FILE] [--no-docs]`.

`measures.py` lists every row by its stable name; each other module that has a `measure` is one case. What is
compared with what, and how, is told in `docs/performance.md`.
"""
