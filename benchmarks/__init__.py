"""Benchmarks: `make bench`, or `python -m benchmarks [--quick] [--json FILE]`."""
