"""What the files of a failed epoch say together. Pure."""
