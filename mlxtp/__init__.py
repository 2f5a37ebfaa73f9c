"""One model server made of the Macs on one desk."""

__version__ = "0.1.0"
