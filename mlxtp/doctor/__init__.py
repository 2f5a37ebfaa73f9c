"""`mlxtp doctor`: what of this Mac keeps mlxtp from working, and why a group failed."""
