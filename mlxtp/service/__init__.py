"""mlxtp as a service of macOS: its description, its plist, and the installation.

`launchd` has the file and the commands as text; `installed` carries them out.
"""
