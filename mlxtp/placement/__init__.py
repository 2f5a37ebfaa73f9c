"""Choice of the Macs that serve a model, their order and their speed. Pure, but for this machine's probes."""
