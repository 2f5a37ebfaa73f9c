"""The doctor, and the post-mortem of failed epochs."""
