"""Addresses at which other Macs may be: hints, never membership.

`mdns.Discovery` announces this node by Bonjour and finds others. `addresses` keeps what is believed of them,
and for how long (`PeerCache`), and names the addresses to dial next (`Dialing`).
"""
