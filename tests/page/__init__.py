"""The page: its files, what it watches, and what people see of it."""
