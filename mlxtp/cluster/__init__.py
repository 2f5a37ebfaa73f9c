"""Members, the coordinator, deployments and assignments; control links between agents."""
