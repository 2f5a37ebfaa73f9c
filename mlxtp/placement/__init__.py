"""Which Macs serve a model, in which order and how fast. Pure, but for the probes of this machine."""
