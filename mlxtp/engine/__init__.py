"""The rank process: the only folder that computes with MLX."""
