"""Commands of `mlxtp`: one module per command or group of commands. They only parse and print.

`main` has `mlxtp node` and registers the others. Commands reach the running agent through `AgentClient` of
`mlxtp/client.py`; `options` and `printing` are shared.
"""
