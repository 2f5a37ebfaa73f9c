"""Bytes to messages and back: nothing is lost, nothing unlawful is let in, nothing costs memory on credit."""

from __future__ import annotations

import random
import struct
import tracemalloc
from dataclasses import MISSING, fields, make_dataclass, replace
from typing import Any

import msgpack
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtp.errors import Code, LocalProtocolError, RemoteProtocolError
from mlxtp.wire import messages as msg
from mlxtp.wire.cluster_messages import AgentHello, Deployment, Deployments, Members, ModelStatus, RosterEntry
from mlxtp.wire.codecs import FieldCodec
from mlxtp.wire.frames import (
    MAX_FRAME,
    MAX_ITEMS,
    MAX_OBJECTS,
    MAX_OPENING_FRAME,
    Decoder,
    Frame,
    _scan,
    encode,
)
from mlxtp.wire.peer_messages import JoinGrant, JoinOffer, JoinRequest

from .forwards import of_prompt, of_prompts
from .samples import EXAMPLES, MESSAGE, field_codecs, fullest_generate, to_body

pytestmark = pytest.mark.fault


def open_decoder() -> Decoder:
    decoder = Decoder()
    decoder.limit = MAX_FRAME
    return decoder


def read_all(decoder: Decoder, data: bytes) -> list[Frame]:
    decoder.feed(data)
    frames = []
    while (frame := decoder.next_frame()) is not None:
        frames.append(frame)
    return frames


def framed(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def refusal(payload: bytes, decoder: Decoder | None = None) -> Code:
    with pytest.raises(RemoteProtocolError) as caught:
        read_all(decoder or open_decoder(), framed(payload))
    return caught.value.code


@given(MESSAGE, st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_every_message_arrives_as_it_was_sent(message: msg.Message, epoch: int, seq: int) -> None:
    assert read_all(open_decoder(), encode(message, epoch, seq)) == [Frame(message, epoch, seq)]


@settings(max_examples=40)
@given(st.lists(MESSAGE, max_size=6), st.data())
def test_how_the_stream_is_cut_does_not_matter(messages: list[msg.Message], data: st.DataObject) -> None:
    stream = b"".join(encode(message, 1, seq) for seq, message in enumerate(messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    decoder, frames = open_decoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        frames += read_all(decoder, stream[start:end])
    assert [frame.message for frame in frames] == messages
    assert decoder.pending == 0


ROWS = tuple(range(1, msg.MAX_ROWS + 1))
LAST = (2**31 - 1,) * (msg.MAX_ROWS * msg.MAX_WIDTH)


@pytest.mark.parametrize(
    "message",
    [
        fullest_generate(msg.MAX_FRAME_TOKENS),
        msg.Forward(ROWS, ROWS, (msg.MAX_WIDTH,) * msg.MAX_ROWS, LAST, ROWS),
    ],
    ids=["request", "step"],
)
def test_the_largest_message_fits_a_frame(message: msg.Message) -> None:
    assert read_all(open_decoder(), encode(message, 2**63 - 1, 2**63 - 1)) == [
        Frame(message, 2**63 - 1, 2**63 - 1)
    ]


def test_many_prompts_fit_a_small_frame() -> None:
    count = msg.MAX_PROMPTS
    samplings = [msg.Sampling(0.7, 0.9, 40, 0.1, 0.5, 0.2, msg.U63 - n) for n in range(count)]
    uids = tuple(range(1, count + 1))
    message = of_prompts(uids, (1,) * count, (0,) * count, (5,) * count, samplings=samplings)
    frame = encode(message, 1, 1)
    for decoder in (open_decoder(), Decoder()):  # the latter walks every frame before it unpacks it
        assert [f.message for f in read_all(decoder, frame)] == [message]


def test_the_longest_error_fits_a_link_that_is_not_open() -> None:
    message = msg.Error(max(Code, key=len), "\U0001f4a5" * 2000, 2**32 - 1)
    (frame,) = read_all(Decoder(), encode(message, 2**63 - 1, 2**63 - 1, MAX_OPENING_FRAME))
    assert isinstance(frame.message, msg.Error)
    assert len(frame.message.detail) == 1000


@pytest.mark.parametrize(
    "message",
    [
        msg.Forward((2**32,), (2,)),
        msg.Forward(("one",), (2,)),  # type: ignore[arg-type]
        of_prompt(1, 0, 1, (5,), take=1),  # type: ignore[arg-type]
        of_prompt(1, 0, 1, (5,), sampling=None),  # type: ignore[arg-type]
        of_prompt(1, 0, 1, (5,), sampling=msg.PLAIN),  # type: ignore[arg-type]
        of_prompt(1, 0, 1, (5,), sampling=msg.Sampling(temperature=-0.5)),
        of_prompt(1, 0, 1, (5,), sampling=msg.Sampling(top_p=float("nan"))),
        of_prompt(1, 0, 1, (5,), sampling=msg.Sampling(seed=2**63)),
        msg.Generate(1, (5,), 1, shaping=msg.Shaping(repetition_penalty=0.0)),
        msg.Generate(1, (5,), 1, shaping=msg.Shaping(bias_tokens=(1,) * (msg.MAX_BIASES + 1))),
        msg.Generate(1, (5,), 1, shaping=msg.Shaping(bias_values=(float("inf"),))),
        msg.Generate(1, (5,), 1, shaping=msg.Shaping(bias_values=(1e300,))),
        msg.Generate(1, (5,), 1, shaping=msg.Shaping(grammar_kind="yacc")),
        msg.Generate(1, (5,), 1, shaping=msg.Shaping(grammar="x" * (msg.MAX_GRAMMAR + 1))),
        msg.Generate(1, (5,), 1, logprobs=-2),
        msg.ScoredDelta(1, 0, (5,), (0.5,), 0, (), ()),
        msg.ScoredDelta(1, 0, (5,), (float("-inf"),), 0, (), ()),
        msg.ScoredDelta(1, 0, (5,), (None,), 0, (), ()),  # type: ignore[arg-type]
        msg.Forward((1,), (0,), (1,), (5,), prompts=(msg.PromptPart(1),) * (msg.MAX_PROMPTS + 1)),
        msg.Forward((1,), (0,), (1,), (5,), prompts=(msg.PLAIN,)),  # type: ignore[arg-type]
        msg.SessionStop(1, "bored", 1),
        msg.Evict((0,)),
        msg.LoadShard("x" * 4001, 512, ()),
        msg.Ack(2**70, 0, 0, 0),
        of_prompt(1, 0, 1, (-1,)),
        msg.Forward((1,), (0,), (1,), None, prompts=(msg.PromptPart(1),)),  # type: ignore[arg-type]
        msg.LoadShard("\ud800", 512, ()),
        JoinRequest(bytes(8), bytes(16), "mini\x1b[2J", bytes(65), bytes(32), bytes(32), bytes(8)),
        JoinOffer(b"x", bytes(32), "a\u202eb"),
        JoinGrant(b"x", bytes(32), ("10.0.0.1:1\r",)),
        Deployments((Deployment("org/model\n"),), 0, False),
        Members((RosterEntry("a" * 32, "mini\x9b31m", "5" * 64, False, 1),)),
        ModelStatus("tiny", "5\t", ""),
        AgentHello(1, "a" * 32, "c" * 16, "b", "\x1b]0;title\x07", (), (), (), ""),
    ],
    ids=lambda message: repr(message)[:100],
)
def test_a_value_that_no_peer_would_take_is_not_sent(message: msg.Message) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        encode(message, 1, 1)
    assert caught.value.code is Code.FIELD_INVALID
    assert type(message).__name__ in caught.value.detail


@pytest.mark.parametrize(
    "message",
    [
        msg.Forward((), (2,)),
        msg.Forward((0,), (2,)),
        msg.Forward((1,), ()),
        msg.Forward((1,), (-1,)),
        msg.Forward((1,), (2,), (msg.MAX_FRAME_TOKENS + 1,)),
        msg.Forward((1,), (2,), gathered=(0,)),
        msg.Forward((1,), (2,), agreement="auto"),
        msg.Ack(-1, 0, 0, 0),
        msg.Ack(True, 0, 0, 0),
    ],
    ids=lambda message: repr(message)[:100],
)
def test_a_bad_value_of_a_hot_message_is_refused_by_its_receiver(message: msg.Message) -> None:
    assert refusal(encode(message, 1, 1)[4:]) is Code.FIELD_INVALID


@pytest.mark.parametrize(
    ("said", "heard"),
    [("no\nroom \x1b[31mleft", "no room ?[31mleft"), ("abc\u202efed", "abc?fed"), ("Füße 日本", "Füße 日本")],
)
def test_a_reason_comes_as_one_line_that_can_be_printed(said: str, heard: str) -> None:
    """The receiver sees to that itself."""
    error = msg.Error(Code.INTERNAL, said, 0)
    as_it_is = msgpack.packb([msg.Error.TYPE, 0, 1, to_body(error) | {"detail": said}])
    for data in (encode(error, 0, 1), framed(as_it_is)):
        [frame] = read_all(open_decoder(), data)
        assert frame.message == msg.Error(Code.INTERNAL, heard, 0)


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError) as caught:
        encode(msg.LoadShard("x" * 4000, 512, (1,) * 64), 1, 1, MAX_OPENING_FRAME)
    assert caught.value.code is Code.FRAME_OVERSIZE
    stop = msg.SessionStop(1, "stop", 1)
    size = len(encode(stop, 1, 1, MAX_FRAME)) - 4
    assert encode(stop, 1, 1, size)
    with pytest.raises(LocalProtocolError):
        encode(stop, 1, 1, size - 1)


def ack_body(**changes: Any) -> dict[str, Any]:
    return to_body(msg.Ack(1, 1, 1, 1)) | changes


def ack_frame(body: object = None) -> list[object]:
    return [msg.Ack.TYPE, 1, 1, ack_body() if body is None else body]


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


PING = [msg.Ping.TYPE, 1, 1, {}]
TWICE = msgpack.packb(ack_frame()).replace(b"\xa6digest", b"\xa4step")

EARLY, DEEP = "it ends early", "nested deeper than 5"
NO_FRAME = "not an array of type, epoch, seq and body"
NOT_WHOLE = "type, epoch and seq must be whole numbers"
MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", EARLY),
    "not msgpack": (b"\xc1", "byte 0xc1 starts no object that is allowed"),
    "cut short": (msgpack.packb(PING)[:-1], EARLY),
    "bytes after the end": (msgpack.packb(PING) + b"\xc0", "unpack"),
    "two objects": (msgpack.packb(PING) * 2, "unpack"),
    "a map": (msgpack.packb({"type": 3}), NO_FRAME),
    "a number": (msgpack.packb(3), NO_FRAME),
    "three items": (msgpack.packb(PING[:3]), NO_FRAME),
    "five items": (msgpack.packb([*PING, 0]), NO_FRAME),
    "type is a bool": (msgpack.packb([True, 1, 1, {}]), NOT_WHOLE),
    "type is a string": (msgpack.packb(["Ping", 1, 1, {}]), NOT_WHOLE),
    "epoch is a bool": (msgpack.packb([3, True, 1, {}]), NOT_WHOLE),
    "epoch is negative": (msgpack.packb([3, -1, 1, {}]), NOT_WHOLE),
    "epoch is over 63 bits": (msgpack.packb([3, 1 << 63, 1, {}]), NOT_WHOLE),
    "seq is a float": (msgpack.packb([3, 1, 1.0, {}]), NOT_WHOLE),
    "seq is nil": (msgpack.packb([3, 1, None, {}]), NOT_WHOLE),
    "a key twice": (TWICE, "a key appears twice in one map"),
    "a key that is a number": (msgpack.packb(ack_frame({1: 2})), "int is not allowed"),
    "a key that is a list": (b"\x94\x03\x01\x01\x81\x90\x01", "list is not allowed"),
    "not UTF-8": (msgpack.packb([3, 1, 1, {"a": "b"}]).replace(b"\xa1b", b"\xa1\xff"), "'utf-8' codec"),
    "a timestamp": (msgpack.packb([3, 1, 1, {"a": msgpack.Timestamp(1)}]), "byte 0xd6 starts"),
    "an extension": (msgpack.packb([3, 1, 1, {"a": msgpack.ExtType(5, b"x")}]), "byte 0xd4 starts"),
    "an empty extension": (b"\x94\x03\x01\x01\x81\xa1a\xc7\x00\x05", "byte 0xc7 starts"),
    "a long array": (msgpack.packb([3, 1, 1, {"a": [0] * 65}]), "65 items; at most 64 are allowed"),
    "an array longer than the frame": (b"\x94\x03\x01\x01\x81\xa1a\xdd\xff\xff\xff\xff", "4294967295 items"),
    "a long map": (msgpack.packb([3, 1, 1, {str(n): 0 for n in range(65)}]), "65 items"),
    "thousands of levels": (b"\x91" * 3000 + b"\x90", DEEP),
    "deep and large": (msgpack.packb([3, 1, 1, {"a": nested(3), "b": b"x" * 5000}]), DEEP),
    "many objects": (msgpack.packb([3, 1, 1, {"a": [[b"x" * 5] * 60] * 60}]), "more than 1024 objects"),
}

FIELDS: dict[str, object] = {
    "no map": [],
    "empty": {},
    "a field too many": ack_body(more=1),
    "another name": {("digets" if key == "digest" else key): value for key, value in ack_body().items()},
    "a key of bytes": {(b"step" if key == "step" else key): value for key, value in ack_body().items()},
    "a bool for a number": ack_body(step=True),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_frame(what: str) -> None:
    payload, why = MALFORMED[what]
    assert refusal(payload) is Code.FRAME_MALFORMED
    scanned = Decoder() if len(payload) <= MAX_OPENING_FRAME else open_decoder()
    with pytest.raises(RemoteProtocolError, match=f"^malformed frame: {why}") as caught:
        read_all(scanned, framed(payload))
    assert caught.value.code is Code.FRAME_MALFORMED


def test_how_deep_a_frame_may_be_before_the_link_is_open() -> None:
    assert refusal(msgpack.packb([3, 1, 1, {"a": nested(2)}]), Decoder()) is Code.FIELD_INVALID
    assert refusal(msgpack.packb([3, 1, 1, {"a": nested(3)}]), Decoder()) is Code.FRAME_MALFORMED


@pytest.mark.parametrize("what", FIELDS)
def test_a_body_that_does_not_fit_its_type(what: str) -> None:
    assert refusal(msgpack.packb(ack_frame(FIELDS[what]))) is Code.FIELD_INVALID


PROMPT = of_prompt(1, 0, 3, (5, 6, 7))


def prompt_with(**sampling: object) -> bytes:
    body = to_body(PROMPT)
    body["prompts"][0]["sampling"] |= sampling
    frame: bytes = msgpack.packb([msg.Forward.TYPE, 1, 1, body])
    return frame


def test_a_refusal_names_the_field_inside_a_part() -> None:
    with pytest.raises(RemoteProtocolError, match=r"Forward\.prompts\.sampling\.seed: expected an integer"):
        read_all(open_decoder(), framed(prompt_with(seed=-1)))


def test_a_part_of_another_class_is_not_sent() -> None:
    """Two classes may have fields of the same names."""
    other = make_dataclass("Other", [(each.name, object) for each in fields(msg.Sampling)])
    part = other(*(getattr(msg.GREEDY, each.name) for each in fields(msg.Sampling)))
    with pytest.raises(LocalProtocolError, match="cannot be sent: expected a Sampling, got a Other"):
        encode(replace(EXAMPLES[msg.Generate], sampling=part), 1, 1)


def test_a_fault_in_a_codec_is_not_a_value_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msg.Generate, "CODEC", FieldCodec(lambda value: value.nothing, lambda value: value))
    with pytest.raises(AttributeError):
        encode(EXAMPLES[msg.Generate], 1, 1)


@pytest.mark.parametrize("message", [m for m in EXAMPLES.values() if field_codecs(type(m))], ids=repr)
def test_a_refusal_names_the_field(message: msg.Message) -> None:
    for name, _ in field_codecs(type(message)):
        payload = msgpack.unpackb(encode(message, 1, 1)[4:])
        payload[3][name] = {"not": "this"}
        with pytest.raises(RemoteProtocolError, match=rf"{type(message).__name__}\.{name}: expected"):
            read_all(open_decoder(), framed(msgpack.packb(payload)))
        del payload[3][name]
        payload[3]["surplus"] = 0
        wrong = rf"^{type(message).__name__}\.{name}: expected a value, which is missing$"
        if type(message).SPARSE and type(message).__dataclass_fields__[name].default is not MISSING:
            wrong = rf"^{type(message).__name__}: expected a map of exactly the fields "
        with pytest.raises(RemoteProtocolError, match=wrong):
            read_all(open_decoder(), framed(msgpack.packb(payload)))


def test_a_plain_step_sends_nothing_that_every_step_has() -> None:
    step = msg.Forward((3, 1), (40, 7), agreement="".join(["ver", "ify"]))
    [*_, body] = msgpack.unpackb(encode(step, 1, 1)[4:])
    assert body.keys() == {"rows", "positions"}
    whole = body | {"widths": b"", "tokens": b"", "gathered": b"", "agreement": "verify", "drafts": 0}
    for told in (body, whole, whole | {"prompts": []}):
        [frame] = read_all(open_decoder(), framed(msgpack.packb([step.TYPE, 1, 1, told])))
        assert frame.message == step


def test_no_two_messages_have_one_number() -> None:
    with pytest.raises(AssertionError, match="0x11"):
        type("Twice", (msg.Message,), {}, number=msg.Error.TYPE)


@pytest.mark.parametrize("number", [0, 0x0F, 0x7F, 0xFE, 0x100, -1])
def test_an_unknown_type(number: int) -> None:
    assert refusal(msgpack.packb([number, 1, 1, {}])) is Code.UNKNOWN_TYPE


def test_a_peer_before_its_welcome_gets_4_kib() -> None:
    payload = b"x" * (MAX_OPENING_FRAME + 1)
    assert refusal(payload, Decoder()) is Code.FRAME_OVERSIZE
    assert refusal(payload, open_decoder()) is Code.FRAME_MALFORMED


def peak_bytes(decoder: Decoder, data: bytes, code: Code) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError) as caught:
            read_all(decoder, data)
        assert caught.value.code is code
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_an_oversize_length_is_refused_before_anything_is_stored() -> None:
    for length in (MAX_FRAME + 1, 2**32 - 1):
        assert peak_bytes(open_decoder(), struct.pack(">I", length), Code.FRAME_OVERSIZE) < 16 * 1024


BOMBS = {
    "empty maps": b"\xdd" + struct.pack(">I", 1 << 20) + b"\x80" * (1 << 20),
    "rows of empty maps": b"\xdc\x00\x40" + (b"\xdc\x00\x40" + (b"\xdc\x00\x40" + b"\x80" * 64) * 64) * 64,
    "arrays in arrays": b"\xdd\x00\x03\xff\xff" * 200_000,
    "one string too long": b"\xdb\xff\xff\xff\xff" + b"x" * (1 << 20),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_its_own_bytes_alone(name: str) -> None:
    data = framed(BOMBS[name])
    assert peak_bytes(open_decoder(), data, Code.FRAME_MALFORMED) < 3 * len(data) + 64 * 1024


@pytest.mark.parametrize("headers", [b"\x91", b"\xdc\x00\x40", b"\xdc\x0f\xff", b"\xde\x00\x40\xa1a"])
def test_a_small_bomb_on_an_open_link(headers: bytes) -> None:
    data = framed((headers * 4096)[:MAX_OPENING_FRAME])
    assert peak_bytes(open_decoder(), data, Code.FRAME_MALFORMED) < 2 << 20


def test_nothing_of_earlier_frames_is_kept() -> None:
    decoder, frame = open_decoder(), encode(of_prompt(1, 0, 2000, tuple(range(2000))), 1, 1)
    tracemalloc.start()
    try:
        for _ in range(300):
            assert len(read_all(decoder, frame[:100])) == 0
            assert len(read_all(decoder, frame[100:])) == 1
        ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/mlxtp/wire/*")])
        assert sum(trace.size for trace in ours.traces) < 10 * len(frame)
    finally:
        tracemalloc.stop()


def test_the_buffer_never_holds_more_than_a_frame_and_a_read() -> None:
    read = 64 * 1024
    stream = encode(msg.Generate(1, tuple(range(msg.MAX_FRAME_TOKENS)), 1), 1, 1) * 3
    decoder, frames = open_decoder(), 0
    for start in range(0, len(stream), read):
        frames += len(read_all(decoder, stream[start : start + read]))
        assert decoder.pending <= 4 + MAX_FRAME
    assert frames == 3


def mutated(rng: random.Random, frame: bytes) -> bytes:
    """The frame with a few bytes changed, cut out or put in; often its length is mended afterwards."""
    data = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data)) if data else 0
        match rng.randrange(4):
            case 0 if data:
                data[at] = rng.randrange(256)
            case 1 if data:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                del data[at : at + rng.randint(1, 8)]
            case _:
                data[at:at] = rng.randbytes(rng.randint(1, 8))
    return framed(bytes(data[4:])) if rng.random() < 0.8 else bytes(data)


BAD = b"\xc1"  # starts no object
SIZED = [
    *[bytes([0xC4 + i]) + (3).to_bytes(1 << i, "big") + BAD * 3 for i in range(3)],  # bytes
    *[bytes([0xD9 + i]) + (3).to_bytes(1 << i, "big") + BAD * 3 for i in range(3)],  # strings
    *[bytes([0xA0 + n]) + BAD * n for n in (0, 1, 31)],
    *[bytes([0xCA + i]) + BAD * n for i, n in enumerate((4, 8))],  # floats
    *[bytes([0xCC + i]) + BAD * n for i, n in enumerate((1, 2, 4, 8, 1, 2, 4, 8))],  # integers
    *[bytes([first]) for first in (0x00, 0x7F, 0xC0, 0xC2, 0xC3, 0xE0, 0xFF)],
    *[bytes([0x90 + n]) + b"\x07" * n for n in (0, 1, 15)],
    *[bytes([0x80 + n]) + b"\x07\x08" * n for n in (0, 1, 15)],
    *[bytes([0xDC + i]) + (3).to_bytes(2 << i, "big") + b"\x07" * 3 for i in range(2)],
    *[bytes([0xDE + i]) + (3).to_bytes(2 << i, "big") + b"\x07\x08" * 3 for i in range(2)],
]
"""A msgpack object of each form. The numbers in it are read as objects if its size is misread."""


@pytest.mark.parametrize("one", SIZED, ids=lambda one: f"{one[0]:02x} of {len(one)}")
def test_the_walk_knows_the_size_of_every_form(one: bytes) -> None:
    _scan(bytearray(b"\x92" + one + b"\x07"))
    with pytest.raises(ValueError, match="ends early"):
        _scan(bytearray(b"\x92" + one))


def test_objects_are_counted_to_the_last() -> None:
    rest = MAX_OBJECTS - 1 - 16 - 15 * MAX_ITEMS
    full = [[7] * MAX_ITEMS] * 15
    _scan(bytearray(msgpack.packb([*full, [7] * rest])))
    with pytest.raises(ValueError, match="more than"):
        _scan(bytearray(msgpack.packb([*full, [7] * (rest + 1)])))


@pytest.mark.parametrize("limit", [MAX_OPENING_FRAME, MAX_FRAME], ids=["before the link is open", "after"])
@pytest.mark.parametrize("count", [10_000, pytest.param(1_000_000, marks=pytest.mark.chaos)])
def test_noise_is_refused_and_leaves_nothing_behind(count: int, limit: int) -> None:
    rng = random.Random(20_000)
    frames = [encode(message, 1, 1) for message in EXAMPLES.values()]
    frames.append(encode(of_prompt(1, 0, 2000, tuple(range(2000))), 1, 1))
    asking = replace(fullest_generate(3), shaping=msg.Shaping(grammar_kind="regex", grammar="a+"))
    frames += [encode(asking, 1, 1)] * 5  # what nests deepest
    refused = 0
    process = psutil.Process()
    before = process.memory_info().rss
    tracemalloc.start()
    try:
        for _ in range(count):
            noise = mutated(rng, rng.choice(frames))
            if rng.random() < 0.1:
                noise = rng.randbytes(rng.randint(1, 100))
            decoder = Decoder()
            decoder.limit = limit
            try:
                read_all(decoder, noise)
            except RemoteProtocolError:
                refused += 1
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    grown = process.memory_info().rss - before
    print(f"{count} mutated frames: {refused} refused, {grown / 2**20:.1f} MB more")
    assert refused > count // 2
    assert grown < 20 << 20
    # Some MB may be the interpreter's own: its table of interned strings grows once, by 8 MB in a long run.
    assert kept < 12 << 20
    assert peak < 16 << 20
