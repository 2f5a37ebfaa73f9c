"""The options of `mlxtp node` and `mlxtp demo`, and what `--help` says about them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .config import DEFAULT_CONTROL_PORT, DEFAULT_HTTP, EMBEDDED_MODEL

TUNING = "Engine"
CLUSTER = "Cluster"
ENDPOINT = "Endpoint"

Ranks = Annotated[
    int | None,
    typer.Option(
        help="Processes that share the model on this machine: 1, 2 or 4. Several are for trying things out "
        "on one machine, and mean --alone. Default: 1, for the demo 2."
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help=f"A model folder, or an id on the Hugging Face Hub (OWNER/NAME). Default: {EMBEDDED_MODEL}, a "
        "toy that comes with mlxtp."
    ),
]
Http = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help=f"Where chat apps find it; port 0 takes a free one. Default: {DEFAULT_HTTP}, for apps on this "
        "machine. 0.0.0.0:52415 is for other machines too; those need an API key: `mlxtp key create`.",
    ),
]
Home = Annotated[
    Path | None,
    typer.Option(
        help="Folder for what is kept, such as who belongs to the cluster, and for config.toml; also "
        "MLXTP_HOME. Only needed for several on one machine."
    ),
]

Drained = Annotated[
    str | None,
    typer.Option(
        "--drain",
        metavar="SECONDS",
        help="When told to stop, such as by Ctrl-C: how long requests may take to end. A second Ctrl-C ends "
        "at once. Default: 10.",
    ),
]
LogFormat = Annotated[
    str | None,
    typer.Option(
        metavar="text|json",
        help="How the log is written to standard error: lines for people, or one JSON object each. Default: "
        "text.",
    ),
]

LoadOnRequest = Annotated[
    bool | None,
    typer.Option(
        "--load-on-request/--no-load-on-request",
        help="A request that names another model on this Mac's disk has it loaded, once nothing is asked of "
        "the loaded one any more. `mlxtp serve` pins a model, which no request replaces. Default: no.",
        rich_help_panel=CLUSTER,
    ),
]

Agreement = Annotated[
    str | None,
    typer.Option(
        help="How all Macs come to hold the same token: one decides (broadcast), or all compute it and "
        "compare (verify). Leave it at auto.",
        rich_help_panel=TUNING,
    ),
]
MaxContext = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="Most tokens of prompt and answer. Default: what the model was made for.",
        rich_help_panel=TUNING,
    ),
]
KvBits = Annotated[
    str | None,
    typer.Option(
        metavar="0|4|8",
        help="Bits of a number in the KV cache, 0 for all: longer contexts, but one request at a time.",
        rich_help_panel=TUNING,
    ),
]
KvBytes = Annotated[
    str | None,
    typer.Option(
        metavar="AMOUNT",
        help="Memory for KV caches on each Mac, such as 4GB. Default: three quarters of what is free.",
        rich_help_panel=TUNING,
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        help="A small model with the same vocabulary, which proposes tokens so that answers come faster.",
        rich_help_panel=TUNING,
    ),
]
Speculation = Annotated[
    bool | None,
    typer.Option(
        "--speculation/--no-speculation",
        help="Check several likely tokens at once. Default: yes.",
        rich_help_panel=TUNING,
    ),
]
PrefixCache = Annotated[
    bool | None,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="Compute the beginning that prompts share only once. Default: yes.",
        rich_help_panel=TUNING,
    ),
]
Compiled = Annotated[
    bool | None,
    typer.Option(
        "--compiled/--no-compiled",
        help="Build the graph of a step once and use it again. Default: yes.",
        rich_help_panel=TUNING,
    ),
]
Spare = Annotated[
    bool | None,
    typer.Option(
        "--spare/--no-spare",
        help="Keep a process ready for the case that a rank here dies. Default: yes.",
        rich_help_panel=TUNING,
    ),
]

Join = Annotated[
    str | None,
    typer.Option(
        "--join",
        metavar="[TOKEN]",
        help="Join a cluster with a token that `mlxtp token` prints on a Mac of it. Without a token: go on "
        "as the member this Mac already is, and never found a cluster. With -: read the token from standard "
        "input. Also MLXTP_JOIN.",
        rich_help_panel=CLUSTER,
    ),
]
Alone = Annotated[
    bool | None,
    typer.Option(
        "--alone", help="Serve on this Mac only: talk to no others, and let none in.", rich_help_panel=CLUSTER
    ),
]
Name = Annotated[
    str | None, typer.Option(help="What to call this Mac. Default: its host name.", rich_help_panel=CLUSTER)
]
Control = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS:PORT",
        help=f"Where other Macs reach this one. Default: port {DEFAULT_CONTROL_PORT} of every address.",
        rich_help_panel=CLUSTER,
    ),
]
Interface = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Use only this IPv4 address of this Mac, where it has several.",
        rich_help_panel=CLUSTER,
    ),
]
Peer = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        metavar="HOST:PORT",
        help=f"Where another Mac is, if Bonjour does not find it; port {DEFAULT_CONTROL_PORT} unless given. "
        "May be repeated.",
        rich_help_panel=CLUSTER,
    ),
]
Bonjour = Annotated[
    bool | None,
    typer.Option(
        "--discovery/--no-discovery",
        help="Find other Macs, and be found, by Bonjour. Default: yes.",
        rich_help_panel=CLUSTER,
    ),
]
Nodes = Annotated[
    str | None,
    typer.Option(
        metavar="auto|all|N",
        help="With --model: how many Macs to spread it over. Default: auto, as many as are fastest.",
        rich_help_panel=CLUSTER,
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        metavar="auto|jaccl|ring",
        help="How Macs exchange while they compute: RDMA over Thunderbolt (jaccl) or TCP (ring). Default: "
        "auto, the faster that works.",
        rich_help_panel=CLUSTER,
    ),
]
FastFences = Annotated[
    bool | None,
    typer.Option(
        "--fast-fences/--no-fast-fences",
        help="Much shorter waits between CPU and GPU (MLX_METAL_FAST_SYNCH=1). Can hang a GPU until its Mac "
        "is restarted. Default: no.",
        rich_help_panel=CLUSTER,
    ),
]
KeepAwake = Annotated[
    bool | None,
    typer.Option(
        "--keep-awake/--no-keep-awake",
        help="Keep this Mac from falling asleep by itself while it serves. Default: yes.",
        rich_help_panel=CLUSTER,
    ),
]
Rdma = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NODE=DEVICE",
        help="The RDMA device of a Mac, by hand: studio=rdma_en5, or studio/mini=rdma_en5 for one cable. May "
        "be repeated.",
        rich_help_panel=CLUSTER,
    ),
]

ApiKeys = Annotated[
    str | None,
    typer.Option(
        metavar="auto|always|never",
        help="When an API key is asked for. Default: auto: if other machines reach the endpoint, and on this "
        "one as soon as there is a key (`mlxtp key create`).",
        rich_help_panel=ENDPOINT,
    ),
]
ModelFolder = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DIR",
        help="Where models are that are called by a plain name: NAME is DIR/NAME. May be repeated.",
    ),
]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host",
        metavar="NAME",
        help="A name under which this Mac is reached, such as that of a proxy, beside its host name and "
        "addresses; * for any. May be repeated.",
        rich_help_panel=ENDPOINT,
    ),
]
AllowedOrigin = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-origin",
        metavar="ORIGIN",
        help="A web page whose program may use the endpoint from a browser, such as http://localhost:3000; * "
        "for any. May be repeated.",
        rich_help_panel=ENDPOINT,
    ),
]
HttpCert = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Speak HTTPS with this certificate (PEM, those it hangs on behind it); goes with --http-key.",
        rich_help_panel=ENDPOINT,
    ),
]
HttpKey = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="The private key of --http-cert (PEM, without a password).",
        rich_help_panel=ENDPOINT,
    ),
]
HttpTls = Annotated[
    bool | None,
    typer.Option(
        "--http-tls/--no-http-tls",
        help="Speak HTTPS with a certificate that mlxtp makes itself, and clients have to be told to trust. "
        "Default: no.",
        rich_help_panel=ENDPOINT,
    ),
]
