"""mlxtp as a service: one description, a plist or a unit of it, and what installs that."""
