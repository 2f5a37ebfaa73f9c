"""Choice of the Macs that serve a model, of their order and their fabric. Only `hardware` does I/O.

Read `topology` (links among Macs) and `model_shape` first. `cost_model` estimates speed and memory, from
`tables` and `measurements`. `candidates` lists the possible groups, and `planner.plan` chooses one. `faults`
is the table of faults, and `formation` keeps failed groups. `hardware` probes this machine: `probe_macos`
parses, and `probe_machine` makes the report.
"""
