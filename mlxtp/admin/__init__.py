"""Reports of an agent about itself, and its commands.

`parts` has the parts of an agent and facts of them. `snapshot` gathers all once, for the page and `status`;
`metrics` and `checkup` (the doctor's facts) read the same. `handlers` carry commands out.
"""
