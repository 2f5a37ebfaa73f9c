"""mlxtp as a service of macOS: its description, the plist made of it, and the installation.

`launchd` has the file and the commands as text; `installed` carries them out.
"""
