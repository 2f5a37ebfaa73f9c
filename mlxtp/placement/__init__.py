"""Choice of the Macs that serve a model, their order and their speed. Pure, but for this machine's probes.

Read `topology` (links among Macs) and `model_shape` first. `cost_model` estimates speed and memory, from
`tables` and `measurements`. `candidates` lists the groups that could form, and `planner.plan` chooses one.
`faults` is the table of faults, `formation` keeps groups that failed. `hardware` probes this
machine: `probe_macos` parses, `probe_machine` makes the report of it.
"""
