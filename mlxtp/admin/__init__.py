"""Reports of an agent about itself, and its commands.

`parts` has the parts of an agent and facts about them. `snapshot` gathers these once, for the page and
`status`; `metrics` and `checkup` (the doctor's facts) read it too. `handlers` carry commands out.
"""
