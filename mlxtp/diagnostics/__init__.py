"""The doctor, and the post-mortem of failed epochs.

`rows` has the doctor's rows. `checks` has the faults that it finds in the `facts` that `checkup` collects.
`failure_store` keeps files of failed epochs. `causes` finds the likely cause in them.
"""
