"""Members, the coordinator, and the desired state; control links between agents."""
