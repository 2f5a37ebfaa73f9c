"""mlxtp as a service: its description, the plist or unit made of it, and the installation."""
