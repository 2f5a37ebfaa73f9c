"""Other projects' own tests against this endpoint: `make peers`."""
