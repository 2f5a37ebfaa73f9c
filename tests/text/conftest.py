"""Small tokenizers, as the tests of the API have them."""

from ..api.conftest import loaded  # noqa: F401
