"""Client requests in, confirmed tokens out, across epochs."""
