"""Coverage-guided fuzzing of everything that reads what others wrote, and what it has found so far."""
