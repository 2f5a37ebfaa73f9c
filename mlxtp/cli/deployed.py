"""Deployments and their groups as text, for `mlxtp status`. All is pure, and fits any width."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from ..values import stage_words

COLOURS = {"alive": "green", "ready": "green", "suspect": "yellow", "dead": "red", "failed": "red"}


def deployments_shown(deployments: Sequence[Mapping[str, Any]], width: int) -> list[Text]:
    """Return a line for each deployment, and below it its groups, wrapped at `width` columns."""
    return [line for each in deployments for line in _deployment(each, width)]


def _deployment(shown: Mapping[str, Any], width: int) -> Iterator[Text]:
    ready, wanted = shown["replicas"]["ready"], shown["replicas"]["wanted"]
    replicas = f"{ready} of {wanted}" if wanted else f"{ready}, as many as fit"
    said = f"{shown['state']}, replicas: {replicas}{_chosen(shown)}"
    line = Text("\n".join(_wrapped(f"{shown['model']}: {said}", width, 0)))
    line.stylize("cyan", 0, len(shown["model"]))
    yield line
    why = shown["why"]
    told = set()
    for group in shown["groups"]:
        for text in _group(group):
            yield Text("\n".join(_wrapped(text, width, 2)), COLOURS.get(group["state"], "yellow"))
        if group["why"] and group["why"] not in told and group["state"] != "ready":
            told.add(group["why"])
            yield Text("\n".join(_wrapped(group["why"], width, 5)))
    if why and not told:
        yield Text("\n".join(_wrapped(why, width, 2)))


def _chosen(shown: Mapping[str, Any]) -> str:
    """Return what a user chose for a deployment, as far as it is not the default."""
    found = [f"--nodes {shown['nodes']}"] if shown["nodes"] != "auto" else []
    found += [f"--parallel {shown['parallel']}"] if shown["parallel"] else []
    found += [f"--split {shown['split']}"] if shown["split"] != "auto" else []
    found += [f"on {' and '.join(shown['on'])} only"] if shown["on"] else []
    if not shown["pinned"]:
        found.append(kept(shown["keep_s"]))
    return "".join(f", {each}" for each in found)


def kept(keep_s: int) -> str:
    """Return in words how long a deployment that is not pinned stays."""
    if keep_s >= 2**32 - 1:
        return "until its memory is needed"
    return f"until it is unused for {keep_s} s" if keep_s else "until it has answered"


def _group(group: Mapping[str, Any]) -> list[str]:
    number = group["id"].rpartition("#")[2]
    if not group["members"]:
        owner = f", to run on {group['owner_name']}" if group["owner"] else ""
        return [f"#{number} {group['state']}{owner}"]
    macs = " + ".join(
        each["name"] + (" (owner)" if each["node_id"] == group["owner"] and len(group["members"]) > 1 else "")
        for each in group["members"]
    )
    work = [f"requests: {group['requests']['running']} running, {group['requests']['waiting']} waiting"]
    if group["tokens_per_second"] is not None:
        work.append(f"{group['tokens_per_second']} tokens/s")
    if group["cached_tokens"]:
        work.append(f"{group['cached_tokens']:,} tokens cached")
    crossing = [f"   {group['exposed']}"] if group.get("exposed") else []
    return [
        f"#{number} {group['state']} on {macs}{joined(group)}, epoch {group['epoch']}",
        f"   {', '.join(work)}",
        *crossing,
    ]


def joined(group: Mapping[str, Any]) -> str:
    """Return in words how the ranks of a group share a model, with a comma before each part."""
    return "".join(f", {each}" for each in (group["kind"], stage_words(group["split"])) if each)


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    indent += len(text) - len(text.lstrip())
    return textwrap.wrap(
        text.lstrip(),
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
