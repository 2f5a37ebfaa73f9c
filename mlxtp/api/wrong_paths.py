"""Advice for paths that are not served: mostly a base URL with too many parts. Pure."""

from __future__ import annotations

from collections.abc import Callable

#: APIs of other servers, by the beginnings of their paths, with what to use instead.
_OTHER_APIS = {
    "/v1beta": "Gemini's API is not served here; /v1/chat/completions is OpenAI's, /v1/messages Anthropic's",
    "/api/v0": "LM Studio's own API is not served here; /v1/chat/completions is OpenAI's, /api/chat Ollama's",
    "/completion": "llama.cpp's own API is not served here; /v1/completions continues a prompt",
    "/infill": "text is continued, not filled in; /v1/completions continues a prompt",
    "/generate": "TGI's own API is not served here; /v1/completions continues a prompt",
}
_MOST_PARTS = 6  # of an endpoint's path


def meant(path: str, is_served: Callable[[str], bool]) -> str:
    """Return the endpoint that `path` ends with, such as `/v1/messages` for `/v1/v1/messages/`, or ""."""
    parts = path.strip("/").split("/")[-_MOST_PARTS:]
    ends = ("/" + "/".join(parts[first:]) for first in range(len(parts)))
    return next((end for end in ends if is_served(end)), "")


def advice(path: str, end: str) -> str:
    """Return what to use instead of `path`, or "". `end`: the endpoint that is `meant`."""
    for beginning, words in _OTHER_APIS.items():
        if path == beginning or path.startswith(f"{beginning}/"):
            return words
    return f"the path is {end}: correct the client's base URL" if end else ""
