"""This Mac's keys and membership, and the exchange by which it joins a cluster."""
