"""Comparison of what two Macs run, made when they meet: can their ranks compute together? Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Build:
    """Versions and flags of an agent, as its AgentHello reports them.

    `protocol` is the wire's version. `versions` and `flags` are "name=value". A flag that is not named is at
    its default, so that a later version may have one more.
    """

    protocol: int
    versions: tuple[str, ...]
    flags: tuple[str, ...]


def compare(
    ours: Build, theirs: Build, their_name: str = "the other Mac", our_name: str = "this Mac"
) -> str | None:
    """Return the reason why these two cannot be ranks of one group, and the remedy; None when they can.

    Only the first difference is named, because it makes the others pointless. Pass both names where the text
    is read on either Mac.
    """
    if ours.protocol != theirs.protocol:
        return (
            f"{our_name} speaks protocol {ours.protocol}, {their_name} protocol {theirs.protocol}: install "
            "the same mlxtp on both"
        )
    our_versions, their_versions = _pairs(ours.versions), _pairs(theirs.versions)
    for package, same, rule in _RULES:
        one, other = our_versions.get(package, "none"), their_versions.get(package, "none")
        if same(one) != same(other):
            return f"{our_name} runs {package} {one}, {their_name} {package} {other}: {rule}"
    our_flags, their_flags = _pairs(ours.flags), _pairs(theirs.flags)
    for flag in sorted(our_flags.keys() | their_flags.keys()):
        one, other = our_flags.get(flag, _UNSET), their_flags.get(flag, _UNSET)
        if one != other:
            return (
                f"{flag} is {one} on {our_name} and {other} on {their_name}: ranks compute alike only with "
                "the same; start both with the same flags"
            )
    return None


_UNSET = "at its default"


def _major(version: str) -> str:
    return version.partition(".")[0]


#: Package, the part of its version that must be equal, and the advice when it is not.
_RULES: tuple[tuple[str, Callable[[str], str], str], ...] = (
    ("mlxtp", _major, "versions may differ behind the first point only; install the same mlxtp on both"),
    ("mlx", str, "ranks compute alike only with the same; install one version on both"),
    ("mlx-lm", str, "ranks compute alike only with the same; install one version on both"),
)


def _pairs(items: tuple[str, ...]) -> Mapping[str, str]:
    return {name: value for name, _, value in (item.partition("=") for item in items)}
