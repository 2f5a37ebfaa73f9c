"""The commands of `mlxtp`: a module for each, or for those that go together. Parsing and printing only."""
