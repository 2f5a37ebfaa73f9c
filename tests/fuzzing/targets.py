"""Targets of fuzzing: each function, the errors it may raise, and inputs to begin with."""

from __future__ import annotations

import functools
import io
import ipaddress
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric import ec
from rich.console import Console
from zeroconf import ServiceInfo
from zeroconf.asyncio import AsyncServiceInfo

from mlxtp.api import catalog
from mlxtp.api import sampling as settings
from mlxtp.api.adapter import About
from mlxtp.api.backend import ModelInfo
from mlxtp.api.dialects import completions, openai, responses_request
from mlxtp.api.dialects.responses import response_body
from mlxtp.api.dialects.responses_request import ResponseStore
from mlxtp.api.guard import host_name
from mlxtp.cluster import state_file
from mlxtp.config import resolve_settings
from mlxtp.diagnostics.causes import examine, rank_record, show
from mlxtp.diagnostics.failure_store import RankEnd, about_rank, postmortems
from mlxtp.discovery.addresses import SERVICE, Advert, DiscoveredPeer, host_and_port, validate
from mlxtp.discovery.mdns import info_of
from mlxtp.engine.loader import MAX_LENGTH, check_header
from mlxtp.errors import ConfigError, LinkError, ProtocolError, RemoteProtocolError, RequestError, UserError
from mlxtp.identity.join_protocol import Host, Joiner, TokenIssuer, read_token
from mlxtp.models import manifest as manifests
from mlxtp.placement import measurements
from mlxtp.placement.machines_file import read_machines
from mlxtp.placement.probe_machine import mac
from mlxtp.placement.probe_macos import COMMANDS
from mlxtp.text.answers import AnswerParser, ReadingPlan, StopFinder
from mlxtp.text.argument_types import types_of
from mlxtp.text.call_style import Separators
from mlxtp.text.calls import CallReader
from mlxtp.text.chat_template import TemplateTraits, plainer, template_messages
from mlxtp.text.conversation import Conversation, GenerationRequest, Tool, characters
from mlxtp.text.markups import CALLS, JSON_CALLS, Markup
from mlxtp.text.renderer import read_reply
from mlxtp.text.tool_grammar import JSON_STYLE, call_grammar, checked_tools, guided_schema
from mlxtp.text.tool_schemas import relaxed
from mlxtp.values import parse_nodes
from mlxtp.wire import certificates, recording
from mlxtp.wire.cluster_messages import FabricResult
from mlxtp.wire.frames import MAX_FRAME, MAX_OPENING_FRAME, Decoder, Frame, encode
from mlxtp.wire.messages import Generate
from mlxtp.wire.peer_messages import JoinGrant, JoinOffer, JoinRequest
from mlxtp.wire.protocol import LinkKind

from ..placement.recorded_macs import MACS, outputs, over_the_wire, recorded
from ..text.families import WRITERS
from ..text.test_markups_families import check
from ..wire.samples import EXAMPLES
from . import links, lying_member

T = TypeVar("T")

CORPUS = Path(__file__).with_name("corpus")
"""In a folder of each target's name the inputs that once broke it."""


@dataclass(frozen=True)
class Target:
    """`run` may raise nothing but `allowed`."""

    run: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]

    def broken_by(self, data: bytes) -> Exception | None:
        """Return the error that this input raises and must not."""
        try:
            self.run(data)
        except self.allowed:
            return None
        except Exception as error:  # noqa: BLE001 - that is the question
            return error
        return None


DEEP = b"[" * 3000
DIGITS = b"9" * 4500
"""More than Python turns into a number."""


def text(data: bytes) -> str:
    return data.decode(errors="replace")


def manifest(data: bytes) -> None:
    """A lender's list of a model's files. What is taken goes on as it came."""
    taken = manifests.from_bytes(data)
    assert manifests.from_bytes(manifests.to_bytes(taken)) == taken
    assert set(manifests.wanted(taken.files)) <= set(taken.files)


_FILES = tuple(manifests.ModelFile(path, 9, "a" * 40) for path in ("config.json", "a/model.safetensors"))
_MANIFESTS = (manifests.to_bytes(manifests.Manifest("owner/name", "b" * 40, _FILES)), b'{"files": [[]]}')
_REPLIES = (b"t\xc3\xa9", b"i\1\0\0\0", b'e["x", "model_invalid", 422]', b"e" + DEEP)


def text_reply(data: bytes) -> None:
    """A reply of the process that runs a model's chat template and tokenizer."""
    read_reply(b"i" if data[:1] == b"i" else b"t", data[:1], data[1:])


def frames(data: bytes) -> None:
    """A stream from a peer that is not known yet, or that is. What is taken can be sent, and comes back."""
    decoder = Decoder()
    decoder.limit = MAX_FRAME if data[:1] > b"\x7f" else MAX_OPENING_FRAME
    decoder.feed(data[1:])
    while (frame := decoder.next_frame()) is not None:
        again = Decoder()
        again.limit = MAX_FRAME
        again.feed(encode(frame.message, frame.epoch, frame.seq))
        assert again.next_frame() == Frame(frame.message, frame.epoch, frame.seq)


FRAMES = tuple(encode(message, 1, 1) for message in EXAMPLES.values())

_KEY, _OTHER_KEY = (ec.derive_private_key(secret, ec.SECP256R1()) for secret in (7, 8))
_CLUSTER, _NODE = "c" * 16, "d" * 32
_AUTHORITY = certificates.found(_CLUSTER, _KEY)
_MEMBER = _AUTHORITY.certify(_NODE, _KEY.public_key())


def certificate(data: bytes) -> None:
    match data[:1]:
        case b"0":
            certificates.read_node(data[1:])
        case b"1":
            certificates.cluster_of(data[1:])
        case b"2":
            certificates.check_node(data[1:], _AUTHORITY.certificate)
        case b"3":
            certificates.check_node(_MEMBER, data[1:])
        case b"4":
            certificates.key_from_pem(data[1:])
        case _:
            certificates.certificates_from_pem(data[1:])


_CERTIFICATES = (
    *(place + der for place in (b"0", b"1", b"2", b"3") for der in (_MEMBER, _AUTHORITY.certificate)),
    b"4" + certificates.key_to_pem(_KEY),
    b"5" + certificates.certificates_to_pem(_MEMBER, _AUTHORITY.certificate),
)


def _desk() -> TokenIssuer:
    return TokenIssuer(_CLUSTER, certificates.authority_hash(_AUTHORITY.certificate))


_TOKEN = _desk().issue(bytes(16), 0.0)


def _host() -> Host:
    desk = _desk()
    desk.issue(bytes(16), 0.0)
    return Host(_AUTHORITY, _MEMBER, desk, bytes(32), members={}, peers=("10.0.0.1:52414",))


def _joiner() -> Joiner:
    return Joiner(_TOKEN, "e" * 32, _OTHER_KEY, "mini", bytes(32))


def joining(data: bytes) -> None:
    """Messages of a stranger at either end of the exchange."""
    decoder = Decoder()
    decoder.feed(data)
    host, joiner, admitted = _host(), _joiner(), None
    while (frame := decoder.next_frame()) is not None:
        match frame.message:
            case JoinOffer() as offer:
                joiner.on_offer(offer, _MEMBER)
            case JoinRequest() as request:
                admitted = admitted or host.on_request(request, 1.0).admitted
            case JoinGrant() as grant:
                joiner.on_grant(grant)
    assert admitted is None or admitted.node_id == "e" * 32


def _exchange() -> tuple[bytes, ...]:
    host, joiner = _host(), _joiner()
    request = joiner.on_offer(host.offer, _MEMBER)
    grant = host.on_request(request, 1.0).message
    said = tuple(encode(message, 0, n) for n, message in enumerate((host.offer, request, grant)))
    return (*said, b"".join(said))


_MODEL = ModelInfo("tiny", ("default",), Path(), 2048, 0, (2,), 512)


def chat(data: bytes) -> None:
    """A body, up to the request that goes to the engine; what comes of it fits into a frame."""
    try:
        _chat(data)
    except RequestError as error:
        error.detail.encode()
        raise


def _chat(data: bytes) -> None:
    _asked(openai.parse_chat(data))


MOST_LINES = 400_000
"""Lines of Python that a schema of 4 KB may cost."""


def rewritten(data: bytes) -> None:
    """A schema on its way to a grammar, in a bounded number of steps."""
    schema = json.loads(data)
    if not isinstance(schema, dict):
        raise ValueError(data)
    left = MOST_LINES

    def step(*_: object) -> Callable[..., object]:
        nonlocal left
        left -= 1
        assert left, f"{len(data)} bytes take more than {MOST_LINES} lines"
        return step

    sys.settrace(step)
    try:
        guided_schema(schema, Separators(), "schema")
        types_of(schema, schema)
    finally:
        sys.settrace(None)


_SCHEMAS = (
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "required": ["a"], "$defs": {"b": {}}},
    {"allOf": [{"$ref": "#"}, {"properties": {"x": {"type": "integer"}}}], "prefixItems": [{"enum": [1]}]},
    {"anyOf": [{"$ref": "a1"}, {"$ref": "#/anyOf/0"}], "patternProperties": {"^a": {"format": "date"}}},
)


def responses(data: bytes) -> None:
    """The same, and what the answer repeats of it."""
    try:
        asked = responses_request.parse(data, _STORE, "")
        _asked(asked)
        about = About("0" * 32, 1.0, "tiny", (2,), (), lambda token: (str(token), None), asked)
        json.dumps(response_body(about, "in_progress", ()), allow_nan=False).encode()
        if asked.dialect.input is not None:
            json.loads(asked.dialect.input)
    except RequestError as error:
        error.detail.encode()
        raise


_STORE = ResponseStore()
_SAID = {"type": "message", "id": "msg_0_0", "role": "assistant", "content": []}
_STORE.put("", "resp_0", b"[]", {"status": "completed", "output": [_SAID]})


def continued(data: bytes) -> None:
    """A body with prompts."""
    try:
        asked = completions.parse(data)
        assert all(0 <= token < 2**31 for each in asked.prompt if isinstance(each, tuple) for token in each)
        settings.shaping(asked.options, _MODEL.vocabulary)
        settings.stop_strings(asked.options.stop)
    except RequestError as error:
        error.detail.encode()
        raise


def _asked(asked: GenerationRequest) -> None:
    conversation, wish = asked.prompt, asked.options
    assert isinstance(conversation, Conversation)
    if catalog.find_model(asked.model, [_MODEL]) is None:
        raise catalog.unknown_model(asked.model, [_MODEL.id])
    seed = 1 if wish.seed is None else settings.seed_of(wish.seed)
    sampling = settings.sampling(wish, _MODEL.defaults, seed)
    schemas = relaxed(checked_tools(conversation.tools), True)[0]
    grammar = ("lark", call_grammar(schemas, JSON_STYLE)) if schemas else ("", "")
    shaping = settings.shaping(wish, _MODEL.vocabulary, grammar)
    stops = StopFinder(settings.stop_strings(wish.stop))
    catalog.check_may_fit(characters(conversation), 16, _MODEL)
    for traits in plainer(TemplateTraits(tools=True)):
        for message in template_messages(conversation, traits, JSON_CALLS.written):
            stops.push(message["content"].encode().decode())
    tokens = catalog.token_budget(wish.max_tokens, (5, 6), _MODEL)
    settings.check_min_tokens(shaping.min_tokens, tokens)
    wanted = {"logprobs": wish.logprobs, "ignore_eos": wish.ignore_eos}
    encode(Generate(1, (5, 6), tokens, sampling, shaping, **wanted), 1, 1)


_HELLO = {"messages": [{"role": "user", "content": "hi"}]}
_CHATS = (
    _HELLO,
    _HELLO | {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": -7, "n": 2},
    _HELLO | {"stop": ["a", "ab"], "max_tokens": 5, "min_tokens": 2, "ignore_eos": True, "stream": True},
    _HELLO | {"logit_bias": {"5": -1.5}, "logprobs": True, "top_logprobs": 3, "repetition_penalty": 1.1},
    _HELLO | {"xtc_probability": 0.5, "xtc_threshold": 0.1, "presence_penalty": 1, "frequency_penalty": -1},
    *(
        _HELLO | {"response_format": format_}
        for format_ in (
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
            {"type": "regex", "pattern": "a+"},
            {"type": "lark", "grammar": 'start: "a"'},
        )
    ),
    {"messages": [{"role": "developer", "content": [{"type": "text", "text": "\ud83d\ude00"}]}]},
    _HELLO | {"tools": [], "tool_choice": "auto", "stream_options": {"include_usage": True}},
    _HELLO | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
    {
        "messages": [
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "2"},
        ],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"a": 1},
    },
)


_FORMATS = tuple(row.format for row in CALLS)
_OFFERED = (Tool("f", "", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}}),)


def tool_output(data: bytes) -> None:
    """Output of a model that was offered tools: first the format, then text in pieces. Nothing is lost."""
    format_ = _FORMATS[data[0] % len(_FORMATS)] if data else _FORMATS[0]
    reader = CallReader(format_, _OFFERED)
    channels, parts = AnswerParser(ReadingPlan(Markup(("<think>", "</think>")), calls=reader)), []
    for piece in text(data[1:]).split("|||"):
        parts += channels.push(piece)
    parts += channels.finish(cut=bool(data) and data[0] >= 128)
    assert channels.held == 0
    names = [part.call.name for part in parts if part.call is not None and part.call.name]
    assert reader.complete <= len(names)
    for name in names:
        name.encode()
    for number in range(len(names)):
        arguments = [part.call.text for part in parts if part.call is not None and part.call.index == number]
        assert data[0] >= 128 or isinstance(json.loads("".join(arguments)), dict)


_CALLED = tuple(
    bytes((number,)) + WRITERS[format_.name]([("f", {"a": 1, "b": "two"})]).encode()
    for number, format_ in enumerate(_FORMATS)
)


def calls_back(data: bytes) -> None:
    """Calls as a family's template writes them, chosen by a number, come back as they were."""
    check(_FORMATS[data[0] % len(_FORMATS)].name if data else "json", int.from_bytes(data[1:9]))


def stops(data: bytes) -> None:
    """An answer in any pieces, up to the first stop string that is complete."""
    first, _, answer = text(data).partition("\n")
    wanted = [stop for stop in first.split(",") if stop]
    finder = StopFinder(wanted)
    shown = "".join(map(finder.push, answer.split("|"))) + finder.finish()
    whole = answer.replace("|", "")
    ends = [(whole.find(stop) + len(stop), -len(stop)) for stop in wanted if stop in whole]
    if not ends:
        assert shown == whole
        return
    end, size = min(ends)
    assert shown == whole[: end + size]


def addresses(data: bytes) -> None:
    """Headers, and the addresses that members tell."""
    told = text(data)
    host_name(told)
    host_name(f"//{told}")
    host_name(data.decode("latin-1"))
    host_and_port(told)


def bonjour(data: bytes) -> None:
    """Name, port, addresses and TXT record of a service; what is believed can be shown and dialled."""
    label, _, rest = data.partition(b"\0")
    service = f"{text(label)}.{SERVICE}"
    port, count, rest = int.from_bytes(rest[:2], "big"), rest[2] % 32 if len(rest) > 2 else 0, rest[3:]
    packed = [rest[4 * n : 4 * n + 4] for n in range(count)]
    info = info_of(service)
    if info is None:
        return
    txt = ServiceInfo(SERVICE, service, properties=rest[4 * count :]).properties
    found = validate(service, txt, packed, port)
    if isinstance(found, DiscoveredPeer):
        assert found.name.isprintable()
        assert all(host_and_port(address) for address in found.addresses)


def _announced() -> bytes:
    advert = Advert("a" * 32, "b" * 16, "studio", 52414, True, 1)
    label = advert.service().removesuffix(f".{SERVICE}").encode()
    txt = AsyncServiceInfo(SERVICE, advert.service(), properties=advert.properties()).text
    return label + b"\0" + (52414).to_bytes(2, "big") + b"\1" + ipaddress.IPv4Address("10.0.0.1").packed + txt


_COMMANDS = sorted(COMMANDS)


def hardware(data: bytes) -> None:
    """Output of a command: the parser replies, and the machine fits into its message."""
    command = _COMMANDS[data[0] % len(_COMMANDS)] if data else _COMMANDS[0]
    COMMANDS[command].parse(text(data[1:]))
    found = mac(outputs(MACS[0], **{command: text(data[1:])}), "192.168.1.10")
    assert over_the_wire(found) == found


_PRINTED = tuple(
    bytes((n,)) + said[command].encode()[:4000]
    for said in map(recorded, MACS)
    for n, command in enumerate(_COMMANDS)
    if command in said
)


@functools.cache
def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mlxtp-fuzz-")


def configuration(data: bytes) -> None:
    """config.toml, or the value of one variable."""
    home = Path(_home().name)
    name, equals, value = text(data).partition("=")
    variables = {f"MLXTP_{name}": value} if equals and name.isupper() else {}
    (home / "config.toml").write_bytes(b"" if variables else data)
    resolve_settings({"home": home}, variables)
    parse_nodes(value, "nodes")


_CONFIGURATIONS = (
    b'http = "127.0.0.1:52415"\nranks = 2\nmodel = "tiny"\nbackend = "auto"\nrepeatable = true\n',
    b'kv_bits = 8\nkv_bytes = "1.5GiB"\nmax_context = 4096\nnodes = "all"\npeers = ["10.0.0.2:52414", "a"]\n',
    b'control = "10.0.0.1:1"\ninterface = "10.0.0.1"\nname = "studio"\nfabric = "ring"\n',
    b'[rdma]\nstudio-1 = "rdma_en5"\n',
    b"KV_BYTES=500MB", b"NODES=8", b"RANKS=4", b"MAX_CONTEXT=1_000", b"PEERS=a:1,b:2", b"HTTP=[::1]:80",
    b"CONTROL=10.0.0.1:52414", b"MAX_CONTEXT=" + DIGITS, b"NODES=" + DIGITS, b"CONTROL=10.0.0.1:" + DIGITS,
    b"PEERS=a:" + DIGITS, b"KV_BYTES=" + DIGITS, b"RANKS=" + DIGITS, b"HTTP=[::1]:" + DIGITS,
    b"ranks=" + DIGITS,
    b"a = " + DEEP, b"RDMA=a/b=rdma_en1", b"REPEATABLE=off", b"KV_BITS=4",
)  # fmt: skip


def remembered(data: bytes) -> None:
    """state.json; what is read can be written, and read again."""
    kept = state_file.from_text(data.decode())
    assert state_file.from_text(_written(state_file.to_text, kept)) == kept


def fabrics(data: bytes) -> None:
    """fabric.json; what is read can be used and written."""
    results = measurements.from_text(data.decode())
    measurements.measured(results, fast_fences=False)
    assert measurements.from_text(_written(measurements.to_text, results)) == results


def _written(write: Callable[[T], str], what: T) -> str:
    try:
        return write(what)
    except ValueError as error:
        raise AssertionError("what was read cannot be written") from error


_RESULT = FabricResult(
    ("a" * 32, "f" * 32), "ring", "ring", False, True, 1, 0.25, (1024, 4096), (0.5, 1.0), (0.5, 2.0)
)


def flight_recorder(data: bytes) -> None:
    """The memory that a rank left: up to what `mlxtp doctor --postmortem` makes of it."""
    memory = data[:128].ljust(recording.HEADER_BYTES, b"\0") + data[128:]
    end = RankEnd(0, 1, -9, 0.5, memory=memory.ljust(recording.RECORDING_BYTES, b"\0"), key=bytes(32))
    fields = json.loads(json.dumps(about_rank(end, 2.0, 1.0)))
    _printed([*show(examine(1, "", [rank_record(fields | {"node": "a"})], []))])


def _memory(at: float = 101.0) -> bytes:
    header = bytearray(128)
    recording.BEGAN.pack_into(header, 0, recording.MAGIC, 1e9, 100.0)
    recording.PHASE.pack_into(header, recording.PHASE_AT, at, 6)
    recording.WORDS.pack_into(header, recording.WORDS_AT, 102.0, 8, 5)
    slots = (recording.SLOT.pack(at + n, 5 + n, 0x103, 101.5 + n, n, 2 * n, 101.7 + n, 77) for n in range(3))
    return bytes(header) + b"".join(slots)


def failure(data: bytes) -> None:
    """A file of a failed epoch, from here or another Mac, up to what is printed of it."""
    path = Path(_home().name) / "rank.json"
    path.write_bytes(data)
    found = postmortems([path])
    json.dumps([asdict(each) for each in found])
    for each in found:
        _printed(show(each))


def _printed(lines: list[object]) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    console = Console(file=out, width=200)
    for line in lines:
        console.print(line)
    out.flush()


def _failures() -> tuple[bytes, ...]:
    memory = _memory()
    memory = memory[:128].ljust(recording.HEADER_BYTES, b"\0") + memory[128:]
    end = RankEnd(1, 7, 64, 0.5, memory=memory.ljust(recording.RECORDING_BYTES, b"\0"), key=bytes(32))
    common = {"format": 1, "epoch": 3, "epoch_id": "ab", "node": "a"}
    epoch = {"kind": "epoch", "ended": 1e9, "cause": {"code": "rank_lost", "detail": "gone"}, "hosts": ["a"]}
    return DEEP, *tuple(
        json.dumps(common | fields).encode()
        for fields in (
            about_rank(end, 2.0, 1.0),
            epoch | {"reports": [], "pongs": {}, "machine_bytes": 1 << 30},
        )
    )


_ITEMS = (
    {"input": "hi", "instructions": "be", "store": False, "metadata": {"a": "b"}},
    {
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "\u00e9"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "2"},
            {"type": "item_reference", "id": "msg_0_0"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": "low"},
    },
    {
        "input": "hi",
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "max_output_tokens": 5,
    },
)
_PROMPTS = (
    {"prompt": "hi", "max_tokens": 5, "logprobs": 2, "stop": "x"},
    {"prompt": [[1, 2], [3]], "n": 2, "best_of": 2, "echo": True},
    {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}},
)


def tensor_header(data: bytes) -> None:
    """A header that passes fills the file, and no shape overflows."""
    extra, text = data[:1], data[1:]
    file_bytes = 8 + len(text) + (extra[0] if extra else 0)
    tensors = check_header(text, file_bytes)
    assert sum(tensor.end - tensor.begin for tensor in tensors) == file_bytes - 8 - len(text)
    assert all(0 <= axis <= MAX_LENGTH for tensor in tensors for axis in tensor.shape)


_TENSOR_HEADERS = (
    b'\x18{"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}',
    b'\0{"a": {"dtype": "F32", "shape": [65536, 65536, 65536, 65536], "data_offsets": [0, 0]}}',
    b'\x02{"__metadata__": {"format": "mlx"}, "a": {"dtype": "BF16", "shape": [], "data_offsets": [0, 2]}}',
    b"\0" + DEEP,
)


TARGETS: Mapping[str, Target] = {
    "frames": Target(
        frames,
        (RemoteProtocolError,),
        tuple(opening + frame for opening in (b"\0", b"\xff") for frame in FRAMES),
    ),
    **{
        f"link_{link.name.lower()}": Target(
            links.told_anything(link), (RemoteProtocolError, LinkError), tuple(links.seeds(link))
        )
        for link in LinkKind
    },
    "lying_member": Target(lying_member.run, (), lying_member.SEEDS),
    "certificate": Target(certificate, (ProtocolError, ValueError), _CERTIFICATES),
    "joining": Target(joining, (ProtocolError, UserError), _exchange()),
    "token": Target(lambda data: read_token(text(data)), (ConfigError,), (_TOKEN.text().encode(), b"a-b")),
    "manifest": Target(manifest, (ValueError,), _MANIFESTS),
    "text_reply": Target(text_reply, (RequestError,), _REPLIES),
    "responses": Target(responses, (RequestError,), tuple(json.dumps(each).encode() for each in _ITEMS)),
    "continued": Target(continued, (RequestError,), tuple(json.dumps(each).encode() for each in _PROMPTS)),
    "chat": Target(chat, (RequestError,), tuple(json.dumps(each).encode() for each in _CHATS)),
    "rewritten": Target(
        rewritten,
        (RequestError, ValueError, RecursionError),
        tuple(json.dumps(each).encode() for each in _SCHEMAS),
    ),
    "stops": Target(
        stops, (), (b"ab,b,abc\nxxa|b|c", b"abcd,bc\nxab|cx", b"aa,aab\naaa|aab", "é\né|x".encode())
    ),
    "tool_output": Target(tool_output, (), _CALLED),
    "calls_back": Target(calls_back, (), tuple(bytes((number, 0)) for number in range(len(_FORMATS)))),
    "addresses": Target(addresses, (), (b"localhost:1", b"[::1]:80", b"http://a:1", b"10.0.0.1:52414")),
    "bonjour": Target(bonjour, (), (_announced(),)),
    "hardware": Target(hardware, (), _PRINTED),
    "nodes_file": Target(
        lambda data: read_machines(text(data)),
        (ConfigError,),
        (
            b'links = ["thunderbolt5 mesh", "ethernet 10g", "wifi"]\n[[node]]\nname = "a"'
            b'\nchip = "Apple M3 Ultra"\nmemory = "512GB"\ncount = 2\ngpu_cores = 80\nfree = "1TB"'
            b"\nports = 5\nrdma = true\n",
            b'{"links": "thunderbolt4 ring", "node": [{"chip": "m4 pro", "memory": "64 GiB", "count": 3}]}',
            b'{"links": ' + DEEP,
            b"links = " + DEEP,
            b'[[node]]\nchip = "m4"\nmemory = "' + DIGITS + b'GB"\n',
        ),
    ),
    "configuration": Target(configuration, (ConfigError,), _CONFIGURATIONS),
    "remembered": Target(
        remembered,
        (ValueError, RecursionError),
        (state_file.to_text(state_file.SavedState(peers={"a": ("10.0.0.1:1",)})).encode(), DEEP),
    ),
    "fabrics": Target(
        fabrics, (ValueError, RecursionError), (measurements.to_text([_RESULT]).encode(), DEEP)
    ),
    "flight_recorder": Target(
        flight_recorder, (), (_memory(), _memory(float("nan")), _memory(float("inf")), b"")
    ),
    "failure": Target(failure, (UserError,), _failures()),
    "tensor_header": Target(tensor_header, (ValueError,), _TENSOR_HEADERS),
}  # fmt: skip


def kept(name: str) -> list[Path]:
    """The inputs that once broke this target."""
    return sorted((CORPUS / name).glob("*"))
