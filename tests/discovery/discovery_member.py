"""A process that is nothing but discovery: `discovery_member.py {"advert": {...}, "addresses": [...]}`.

It prints a line of JSON for each change of what is believed and for each sentence, and takes commands, a line
each: refresh, update {...}, close.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from typing import Any

from mlxtp.discovery import mdns
from mlxtp.discovery.addresses import Advert, DiscoveredPeer


def tell(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def tell_sightings(sightings: tuple[DiscoveredPeer, ...]) -> None:
    tell(sightings=[dataclasses.asdict(sighting) for sighting in sightings])


async def main() -> None:
    options = json.loads(sys.argv[1])
    for name, value in options.get("constants", {}).items():
        setattr(mdns, name, value)
    member = mdns.Discovery(tell_sightings, lambda sentence: tell(said=sentence))
    await member.start(Advert(**options["advert"]), options.get("addresses", ()))
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
    )
    while line := await commands.readline():
        match line.decode().split(maxsplit=1):
            case ["refresh"]:
                member.refresh()
            case ["update", advert]:
                member.update(Advert(**json.loads(advert)))
            case ["close"]:
                break
    await member.close()
    tell(closed=True)


if __name__ == "__main__":
    asyncio.run(main())
