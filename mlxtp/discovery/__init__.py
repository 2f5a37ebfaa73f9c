"""Addresses where other Macs may be: hints, never membership.

`mdns.Discovery` announces this node by Bonjour and finds others. `addresses` has the accepted sightings and
their lifetimes (`PeerCache`), and chooses the addresses to dial next (`Dialing`).
"""
