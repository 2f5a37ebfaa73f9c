"""From what a machine's own commands say to what `wire/machine.py` may hold. Pure: texts in, values out."""
