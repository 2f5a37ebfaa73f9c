"""The commands of `mlxtp`: a module for each, or for those that go together. Parsing and printing only.

`main` has `mlxtp node` and names the other modules. A command talks to the running agent by `AgentClient` of
`mlxtp/client.py`. `options` and `printing` are what commands share.
"""
