"""One model server across the Macs on a desk."""

__version__ = "0.1.0"
