"""The agent: spawns ranks, watches them, serves requests. Computes nothing with MLX."""
