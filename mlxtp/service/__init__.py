"""mlxtp as a service: its description, the plist or unit made of it, and the installation.

`managers` has the files and commands of launchd and systemd as text; `installed` carries them out.
"""
