"""An agent's side of a group: epochs, rank processes here and on other Macs, recovery."""
