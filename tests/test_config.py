"""Settings: who wins over whom, and what is said about a wrong value."""

from __future__ import annotations

import json
import os
import time
import tomllib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from mlxtp.config import Limits, Settings, is_loopback, lines_of, resolve_join, resolve_settings
from mlxtp.errors import Code, ConfigError, ModelError
from mlxtp.groups.machines import local_split, placement_options
from mlxtp.placement.model_shape import shape_of
from mlxtp.settings import BY_KEY, SETTINGS, unknown_variables, variable_of
from mlxtp.values import DEFAULT_HTTP
from mlxtp.wire.cluster_messages import Deployment

from .placement.made_up_models import llama


def resolve(home: Path, /, file: str = "", **given: str) -> Settings:
    """Settings of a node in `home`; lower case are flags, capitals are environment variables."""
    if file:
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(file)
    flags = {name: value for name, value in given.items() if name.islower()}
    environment = {name: value for name, value in given.items() if name.isupper()}
    return resolve_settings({"home": home, **flags}, environment)


def refusal(home: Path, /, file: str = "", **given: str) -> str:
    with pytest.raises(ConfigError) as refused:
        resolve(home, file, **given)
    assert refused.value.code is Code.CONFIG
    return refused.value.detail


def in_toml(key: str, text: str) -> str:
    """The value of a flag or variable, as the file has it."""
    if text.replace(".", "").isdigit():
        return text
    if key in SWITCHES:
        return "true" if text == "yes" else "false"
    if key in LISTS:
        return json.dumps([item.strip() for item in text.split(",")])
    return json.dumps(text)


APP = "app://obsidian.md"
ORIGINS = ("http://a:3000", "https://chat.b")


@pytest.mark.parametrize(
    ("key", "low", "high", "attribute", "expected"),
    [
        ("ranks", "2", "4", "ranks", (2, 4)),
        ("model", "here", "there", "model", ("here", "there")),
        ("http", "127.0.0.1:0", "localhost:65535", "http_port", (0, 65535)),
        ("repeatable", "no", "yes", "repeatable", (False, True)),
        ("max_context", "1000", "2_000", "max_context", (1000, 2000)),
        ("kv_bits", "4", "8", "kv_bits", (4, 8)),
        ("kv_bytes", "1GB", "2GiB", "kv_bytes", (10**9, 2 << 30)),
        ("cache_disk", "0", "20GB", "cache_disk", (0, 20 * 10**9)),
        ("name", "studio", "mini", "name", ("studio", "mini")),
        ("control", "10.0.0.1:1000", "10.0.0.2:2000", "control_port", (1000, 2000)),
        ("peers", "a:1, b", "c:2", "peers", (("a:1", "b:52414"), ("c:2",))),
        ("discovery", "no", "yes", "discovery", (False, True)),
        ("nodes", "3", "02", "nodes", ("3", "2")),
        ("backend", "ring", "jaccl", "fabric", ("ring", "jaccl")),
        ("drain", "2.5", "60", "drain_s", (2.5, 60.0)),
        ("model_folders", "/a, /b c", "/d", "model_folders", (("/a", "/b c"), ("/d",))),
        ("rdma", "studio=rdma_en5", "a/b=en3,b=en4", "rdma", (("studio=rdma_en5",), ("a/b=en3", "b=en4"))),
        ("allowed_hosts", "Studio.lan, [::1]", "*", "allowed_hosts", (("studio.lan", "::1"), ("*",))),
        ("allowed_origins", "http://a:3000, https://Chat.b:443/", "*", "allowed_origins", (ORIGINS, ("*",))),
        ("allowed_origins", "app://obsidian.md", "http://a", "allowed_origins", ((APP,), ("http://a",))),
    ],
)
def test_flag_over_variable_over_file(
    tmp_path: Path, key: str, low: str, high: str, attribute: str, expected: tuple[object, object]
) -> None:
    variable = f"MLXTP_{key.upper()}"
    in_file = f"{key} = {in_toml(key, low)}"
    assert getattr(resolve(tmp_path, in_file), attribute) == expected[0]
    assert getattr(resolve(tmp_path, in_file, **{variable: high}), attribute) == expected[1]
    assert getattr(resolve(tmp_path, in_file, **{variable: low, key: high}), attribute) == expected[1]


def test_home_by_flag_over_variable_over_the_systems_place(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert resolve_settings({"home": first}, {"MLXTP_HOME": str(second)}).home == first
    assert resolve_settings({"home": None, "ranks": None}, {"MLXTP_HOME": str(second)}).home == second
    assert resolve_settings({}, {}).home == Path(platformdirs.user_data_dir("mlxtp", appauthor=False))
    assert resolve_settings({}, {"MLXTP_HOME": "~/somewhere"}).home == Path.home() / "somewhere"


@pytest.mark.parametrize(
    ("flag", "variable", "chosen"),
    [
        (None, "", None),
        ("", "", ""),
        ("TOKEN", "", "TOKEN"),
        (None, " TOKEN\n", "TOKEN"),
        ("", "TOKEN", "TOKEN"),
        ("ONE", "OTHER", "ONE"),
        ("-", "OTHER", "ONE"),
    ],
)
def test_where_a_join_token_comes_from(flag: str | None, variable: str, chosen: str | None) -> None:
    assert resolve_join(flag, lambda: " ONE \n", {"MLXTP_JOIN": variable}) == chosen


def test_no_token_on_standard_input_is_said() -> None:
    with pytest.raises(ConfigError, match="--join -: there is no token on standard input"):
        resolve_join("-", lambda: "\n", {"MLXTP_JOIN": "TOKEN"})


@pytest.mark.parametrize(("ranks", "backend"), [(1, "none"), (2, "ring"), (4, "ring")])
def test_several_ranks_need_the_ring(tmp_path: Path, ranks: int, backend: str) -> None:
    assert resolve(tmp_path, ranks=str(ranks)).local_backend == backend


@pytest.mark.parametrize("words", [("1", "0"), ("true", "false"), ("YES", "No"), ("on", "off")])
def test_switches(tmp_path: Path, words: tuple[str, str]) -> None:
    on, off = words
    assert resolve(tmp_path, MLXTP_KEEP_WARM=on).keep_warm
    assert not resolve(tmp_path, MLXTP_KEEP_WARM=off).keep_warm


def test_speculation_may_need_a_draft_model(tmp_path: Path) -> None:
    assert resolve(tmp_path, 'speculation = "draft"\ndraft_model = "tiny"').speculation == "draft"
    assert "config.toml" in refusal(tmp_path, 'speculation = "draft"')
    assert "--draft-model" in refusal(tmp_path, 'speculation = "draft"')


@pytest.mark.parametrize(
    ("value", "expected"), [("500", 500), ("500MB", 5 * 10**8), ("1.5GiB", 3 << 29), ("64kib", 1 << 16)]
)
def test_amounts_of_memory(tmp_path: Path, value: str, expected: int) -> None:
    assert resolve(tmp_path, kv_bytes=value).kv_bytes == expected


@pytest.mark.parametrize(
    "file",
    [
        'rdma = ["studio=rdma_en5", "mini/studio=rdma_en2"]',
        '[rdma]\nstudio = "rdma_en5"\n"mini/studio" = "rdma_en2"',
    ],
)
def test_rdma_devices_by_hand(tmp_path: Path, file: str) -> None:
    assert resolve(tmp_path, file).rdma == ("studio=rdma_en5", "mini/studio=rdma_en2")
    assert resolve(tmp_path, file, rdma="a=b").rdma == ("a=b",)
    assert "'studio=' is not NODE=DEVICE" in refusal(tmp_path, '[rdma]\nstudio = ""')


def test_agents_of_one_machine_use_no_other_address(tmp_path: Path) -> None:
    assert resolve(tmp_path, control="127.0.0.1:0").loopback == "127.0.0.1"
    assert resolve(tmp_path, control="10.0.0.1:0").loopback == resolve(tmp_path).loopback == ""


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, False), ({"model": "m"}, True), ({"MLXTP_MODEL": "m"}, True), ({"file": 'model = "m"'}, True)],
)
def test_whether_a_model_was_asked_for(tmp_path: Path, given: dict[str, str], expected: bool) -> None:
    """Else the embedded one is for a new cluster only, and not for one that serves another already."""
    assert resolve(tmp_path, **given).model_given is expected


def test_a_wrong_value_is_named_with_its_place(tmp_path: Path) -> None:
    wrong = "one machine runs 1 to 4 ranks, not 5"
    assert refusal(tmp_path, ranks="5") == f"--ranks: {wrong}"
    assert refusal(tmp_path, MLXTP_RANKS="5") == f"MLXTP_RANKS: {wrong}"
    assert refusal(tmp_path, "ranks = 5") == f"ranks in {tmp_path / 'config.toml'}, line 1: {wrong}"


@pytest.mark.parametrize(("key", "path"), [("log_file", "~nosuch/x"), ("http_cert", "a\0b")])
def test_what_no_file_can_be_called(tmp_path: Path, key: str, path: str) -> None:
    where = f"{key} in {tmp_path / 'config.toml'}, line 1: {path!r}"
    assert refusal(tmp_path, f"{key} = {json.dumps(path)}").startswith(where)
    assert refusal(tmp_path, model_folders="~nosuch").startswith("--model-folder: '~nosuch'")


@pytest.mark.parametrize("key", ["model", "draft_model"])
@pytest.mark.parametrize("name", ["a\nb", "\0", "a\x1b[2J", "\u202e", "\u2028"])
def test_what_no_model_is_called_is_said_as_it_can_be_printed(tmp_path: Path, key: str, name: str) -> None:
    refused = refusal(tmp_path, f"{key} = {json.dumps(name)}")
    assert refused.startswith(f"{key} in {tmp_path / 'config.toml'}, line 1: {name!r} has characters")
    assert refused.isprintable()
    assert refusal(tmp_path / "other", **{key: name}).startswith(f"--{key.replace('_', '-')}: {name!r} has")


def test_a_name_has_no_blanks_around_it_and_one_of_blanks_is_none(tmp_path: Path) -> None:
    assert resolve(tmp_path, name=" my studio ").name == "my studio"
    assert resolve(tmp_path, 'name = "  "').name == ""


def test_all_that_is_wrong_can_be_had_at_once_with_defaults_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('ranks = 5\nmodle = "x"\nname = 7\nhttp_cert = "a"\ndrain = 3')
    wrong: list[str] = []
    settings = resolve_settings(
        {"home": tmp_path}, {"MLXTP_KV_BITS": "5"}, refuse=lambda error: wrong.append(error.detail)
    )
    assert [each.partition(" ")[0] for each in wrong] == [
        f"{tmp_path / 'config.toml'},", "name", "ranks", "MLXTP_KV_BITS:", "http_cert",
    ]  # fmt: skip
    assert settings == replace(resolve(tmp_path / "other", drain="3"), home=tmp_path)


def test_a_file_is_read_in_a_time_that_grows_with_it(tmp_path: Path) -> None:
    peers = "".join(f'  "10.0.{number >> 8}.{number & 255}:1", # ]\n' for number in range(3000))
    began = time.process_time()
    assert len(resolve(tmp_path, f"peers = [\n{peers}]").peers) == 3000
    assert time.process_time() - began < 2.0  # it took 14


@pytest.mark.parametrize("key", ["max_context", "nodes", "control", "peers", "kv_bytes", "ranks"])
def test_a_number_of_thousands_of_digits(tmp_path: Path, key: str) -> None:
    """Python does not make a number of it."""
    name, begin = f"MLXTP_{key.upper()}", "10.0.0.1:" if key in ("control", "peers") else ""
    assert name in refusal(tmp_path, **{name: begin + "9" * 5000})


def test_a_file_that_is_nested_without_end(tmp_path: Path) -> None:
    assert "nested too deeply" in refusal(tmp_path, "peers = " + "[" * 3000)


@pytest.mark.parametrize("value", ["0", "-1", "8", "two", "2.0"])
def test_ranks_that_cannot_be(tmp_path: Path, value: str) -> None:
    assert refusal(tmp_path, MLXTP_RANKS=value).endswith(f"ranks, not {value}")


@pytest.mark.parametrize(
    "value", ["", "8080", ":8080", "127.0.0.1:", "h:x", "[]:1", "::1:-1", "h:65536", "a b:1", "é:1"]
)
def test_addresses_that_are_none(tmp_path: Path, value: str) -> None:
    assert refusal(tmp_path, http=value) == f"--http: {value!r} is not HOST:PORT, such as {DEFAULT_HTTP}"


HERE = ("127.0.0.1", "127.0.0.2", "127.255.255.254", "::1", "localhost")
ELSEWHERE = ("0.0.0.0", "::", "192.168.1.5", "128.0.0.1", "fe80::1", "127.1", "example.com")
ELSEWHERE += ("localhost.example.com", "127.0.0.1.example.com")


@pytest.mark.parametrize("host", [*HERE, *ELSEWHERE])
def test_what_only_programs_of_this_machine_reach(tmp_path: Path, host: str) -> None:
    assert is_loopback(host) is (host in HERE)
    assert resolve(tmp_path, MLXTP_HTTP=f"[{host}]:8080").http_host == host
    assert not is_loopback("")


@pytest.mark.parametrize(("one", "other"), [("http_cert", "http_key"), ("http_key", "http_cert")])
def test_a_certificate_goes_with_its_key(tmp_path: Path, one: str, other: str) -> None:
    both = resolve(tmp_path, http_cert="~/cert.pem", MLXTP_HTTP_KEY="key.pem")
    assert (both.http_cert, both.http_key) == (str(Path.home() / "cert.pem"), "key.pem")
    detail = refusal(tmp_path, **{one: "x.pem"})
    assert detail.startswith(f"--{one.replace('_', '-')}: HTTPS needs a certificate and its private key")
    assert detail.endswith(f"name the other with --{other.replace('_', '-')}, or {other} in config.toml")
    assert refusal(tmp_path, f'{one} = "x.pem"').startswith(f"{one} in {tmp_path / 'config.toml'}, line 1: ")


WRONG_VALUES: dict[str, tuple[str, ...]] = {
    "repeatable": ("2",),
    "max_context": ("-1", "4k", "16777217"),
    "kv_bits": ("3", "eight"),
    "kv_bytes": ("-1", "lots", "1XB", "1.GB"),
    "cache_disk": ("-1", "auto", "1XB", "1025TiB"),
    "name": ("x" * 81, "two\nlines"),
    "control": ("52414", "studio.local:52414", "10.0.0.1:65536", "[::1]:52414"),
    "peers": ("10.0.0.2:0", "a:1,:2", "http://10.0.0.2:52414", "two words"),
    "nodes": ("0", "9", "both"),
    "rdma": ("rdma_en5", "=rdma_en5", "studio=", "/mini=rdma_en5", "studio/=rdma_en5", "a=b=c"),
    "api_keys": ("sometimes", "Always"),
    "model_folders": ("models",),
    "allowed_hosts": ("http://studio.local", "studio.local:52415", "two words", "a..b"),
    "allowed_origins": ("null", "localhost:3000", "http://a:3000/chat", "http://user@a", "http://"),
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG_VALUES.items() for value in values]
)
def test_a_setting_that_is_none(tmp_path: Path, key: str, value: str) -> None:
    for name, where in ((key, BY_KEY[key].option), (variable_of(key), variable_of(key))):
        place, _, what = refusal(tmp_path, **{name: value}).partition(": ")
        assert place == where
        assert what.partition("' ")[2].startswith(("is n", "is more"))


STRINGS = (
    "http", "model", "speculation", "draft_model", "name", "control", "backend",
    "fabric_networks", "log_format", "log_file", "api_keys", "http_cert", "http_key",
)  # fmt: skip
SWITCHES = (
    "large_buffers",
    "alone", "discovery", "fast_fences", "keep_awake", "keep_warm",
    "load_on_request", "http_tls", "repeatable",
)  # fmt: skip
TIMES = ("deadline", "queue", "load_stall")
LISTS = ("peers", "rdma", "allowed_hosts", "allowed_origins", "model_folders")
STRING, NUMBER, SWITCH = "a string in quotes", "a whole number", "true or false"
AMOUNT, SECONDS = 'a whole number, or a string such as "500MB"', "a number of seconds"
LIST = ('"a:1"', "5", '["a:1", 5]', '{a = "b"}')
WRONG_TYPES = [
    (key, value, expected)
    for keys, values, expected in (
        (STRINGS, ("5", "true", '["a"]', "1979-05-27"), STRING),
        (("drain", *(f"limits.{name}" for name in TIMES)), ('"10"', "true", "[1]"), SECONDS),
        (SWITCHES, ('"no"', '"yes"', "0", "1", "[true]"), SWITCH),
        (("ranks", "max_context", "kv_bits", "limits.open_requests"), ('"4"', "4.0", "true", "[4]"), NUMBER),
        (("kv_bytes", "cache_disk"), ("1.5", "true", "[1]"), AMOUNT),
        (("parallel", "split"), ("5", "true", "[1, 2]"), STRING),
        (("speculation",), ("1", "false", '["auto"]'), STRING),
        (("nodes",), ("2.0", "true", '["all"]'), '"auto", "all", or a whole number'),
        (("peers", "allowed_hosts", "allowed_origins", "model_folders"), LIST, "a list of strings"),
        (("rdma",), ('"a=b"', "true", "[1]", "{a = 5}", "{a = {b = 'c'}}"), "a table of strings"),
    )
    for key in keys
    for value in values
]


@pytest.mark.parametrize(("key", "value", "expected"), WRONG_TYPES)
def test_a_value_of_the_wrong_type(tmp_path: Path, key: str, value: str, expected: str) -> None:
    """It is refused with the key, the value and what is expected, and never understood as something else."""
    table, _, name = key.rpartition(".")
    file = f"[{table}]\n{name} = {value}" if table else f"{name} = {value}"
    detail = refusal(tmp_path, file)
    assert detail.startswith(f"{key} in {tmp_path / 'config.toml'}, line {file.count(chr(10)) + 1}: ")
    assert f" is of the wrong type; it has to be {expected}" in detail
    assert str(tomllib.loads(f"x = {value}")["x"]).lower() in detail.lower()


def test_every_setting_has_a_type_and_a_test_of_it() -> None:
    """A new key needs a line that explains it in the file."""
    assert {key for key, _, _ in WRONG_TYPES} == BY_KEY.keys()
    assert len({variable_of(setting.key) for setting in SETTINGS}) == len(SETTINGS)


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ('ranks = 2\nmodle = "x"', 2, "unknown key 'modle'; did you mean model?"),
        ("max-context = 1", 1, "unknown key 'max-context'; did you mean max_context?"),
        ('peer = ["a"]', 1, "unknown key 'peer'; did you mean peers?"),
        ('[cluster]\nname = "x"', 2, "unknown key 'cluster.name'; did you mean name?"),
        ("# mine\n\nqueue = 3", 3, "unknown key 'queue'; did you mean limits.queue, in the table [limits]?"),
        ("[limits]\nqueu = 3", 2, "unknown key 'limits.queu'; did you mean limits.queue, in the table"),
        ("limits = 3", 1, "limits is a table, which begins with the line [limits]"),
        ("[colours]", 1, "unknown key 'colours'; `mlxtp config show` lists all"),
        ('home = "/elsewhere"', 1, "unknown key 'home'"),  # the file is in it
    ],
)
def test_an_unknown_key(tmp_path: Path, file: str, line: int, said: str) -> None:
    assert refusal(tmp_path, file).startswith(f"{tmp_path / 'config.toml'}, line {line}: {said}")


def test_where_each_key_begins() -> None:
    text = """# first
name = "a"
peers = [
  "a:1",  # not = a key
]
model = '''
ranks = 3
[limits]
'''

[a.rdma]
"mini/studio" = "en3"
[limits]
queue = 3
"""
    assert dict(lines_of(text)) == {
        **{"name": 2, "peers": 3, "model": 6},
        **{"a.rdma": 11, "a.rdma.mini/studio": 12, "limits": 13, "limits.queue": 14},
    }


def test_limits_by_file_and_variable(tmp_path: Path) -> None:
    file = "[limits]\nqueue = 2.5\nopen_requests = 50"
    limits = resolve(tmp_path, file, MLXTP_LIMITS_QUEUE="7").limits
    assert limits == Limits(queue_s=7.0, max_open_requests=50)
    assert refusal(tmp_path, MLXTP_LIMITS_QUEUE="0").startswith("MLXTP_LIMITS_QUEUE: '0' is not a ")


def test_variables_that_mean_nothing() -> None:
    names = ("PATH", "MLXTP_HOME", "MLXTP_RANKS", "MLXTP_URL", "MLXTP_MODLE", "MLXTP_ZZZ", "MLXTP_QUEUE")
    assert unknown_variables(names) == [
        "MLXTP_MODLE is unknown; did you mean MLXTP_MODEL?",
        "MLXTP_QUEUE is unknown; did you mean MLXTP_LIMITS_QUEUE?",
        "MLXTP_ZZZ is unknown; docs/settings.md lists all",
    ]


def test_an_empty_variable_is_not_set(tmp_path: Path) -> None:
    assert resolve(tmp_path, MLXTP_RANKS="", MLXTP_MODEL="") == resolve(tmp_path)


def test_a_command_has_defaults_that_everything_else_beats(tmp_path: Path) -> None:
    defaults = {"ranks": 2, "home": tmp_path}
    settings = resolve_settings({}, {}, defaults)
    assert (settings.ranks, settings.origins) == (2, ())
    assert resolve_settings({}, {"MLXTP_RANKS": "4"}, defaults).ranks == 4
    (tmp_path / "config.toml").write_text("ranks = 1")
    assert resolve_settings({}, {}, defaults).ranks == 1
    assert resolve_settings({}, {"MLXTP_HOME": str(tmp_path / "other")}, defaults).home == tmp_path / "other"


@pytest.mark.parametrize("content", [b"ranks = ", b"ranks 2", b"[", b"\x00", b"\xff\xfe", None])
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    if content is None:
        (tmp_path / "config.toml").symlink_to("config.toml")
    else:
        (tmp_path / "config.toml").write_bytes(content)
    assert refusal(tmp_path).startswith(f"{tmp_path / 'config.toml'}: ")


@pytest.mark.parametrize("what", ["pipe", "device"])
def test_what_is_no_file_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str) -> None:
    """A pipe would be waited for, and /dev/zero has no end."""
    monkeypatch.setattr(Path, "read_text", lambda _: pytest.fail("it is read"))
    file = tmp_path / "config.toml"
    if what == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    assert refusal(tmp_path).startswith(f"{file}: it is not a regular file; ")


def test_a_home_that_is_a_file_has_no_configuration(tmp_path: Path) -> None:
    """The agent says what is wrong with such a home when it takes it."""
    home = tmp_path / "file"
    home.write_text("")
    assert resolve(home).ranks == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"split": "40,24", "parallel": "tensor"}, "40,24 is for a pipeline, and --parallel is tensor"),
        ({"split": "40,24,16", "nodes": "2"}, "40,24,16 is for 3 Macs, and 2 are to share the model"),
        ({"parallel": "pipeline", "nodes": "1"}, "--parallel pipeline takes 2 Macs or more, and 1 is to"),
        ({"split": "40,24,16", "nodes": "3"}, ""),
        ({"split": "40,24", "parallel": "pipeline", "nodes": "all"}, ""),
        ({"split": "9,9,9,9,9,9,9,9,9"}, "is not auto, nor the layers of 2 to 8 Macs"),
        ({"split": "1025,1"}, "is not auto, nor the layers of 2 to 8 Macs"),
        ({"split": "forty,1"}, "is not auto, nor the layers of 2 to 8 Macs"),
    ],
)
def test_a_split_goes_with_what_else_is_set(tmp_path: Path, given: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        assert resolve(tmp_path, **given).split == given["split"]


def test_a_deployment_for_one_mac_is_no_pipeline_though_that_is_set_for_all(tmp_path: Path) -> None:
    settings = resolve_settings({"home": tmp_path, "parallel": "pipeline"}, {})
    for nodes, parallel in (("auto", "pipeline"), ("1", "auto")):
        assert placement_options(settings, Deployment("m", "m", nodes=nodes), "m").parallel == parallel


@pytest.mark.parametrize(
    ("given", "row", "split"),
    [
        ({"parallel": "pipeline"}, {}, (10, 11)),
        ({"parallel": "pipeline", "ranks": 4}, {}, (5, 5, 5, 6)),
        ({"parallel": "pipeline"}, {"parallel": "auto"}, ()),
        ({}, {"split": "20,1"}, (20, 1)),
        ({"ranks": 3}, {}, (7, 7, 7)),
        ({"parallel": "tensor"}, {}, ()),
    ],
)
def test_ranks_of_one_machine_are_a_pipeline_where_that_is_set_or_they_could_not_divide_the_layers(
    tmp_path: Path, given: dict[str, Any], row: dict[str, str], split: tuple[int, ...]
) -> None:
    shape = shape_of(llama(num_hidden_layers=21), name="tiny")
    settings = resolve_settings({"home": tmp_path, "ranks": 2, **given}, {})
    assert local_split(settings, Deployment("tiny", "tiny", **row), shape) == split  # type: ignore[arg-type]
    options = placement_options(settings, Deployment("tiny", "tiny", **row), "tiny")  # type: ignore[arg-type]
    assert options.split == ()


@pytest.mark.parametrize(
    ("split", "says"),
    [
        ("2,1,1", "--split 2,1,1 is for 3 ranks, and 2 share the model"),
        ("2,3", "the split 2,3 has 5 layers, and tiny has 4"),
    ],
)
def test_ranks_of_one_machine_do_not_start_for_a_wrong_split(tmp_path: Path, split: str, says: str) -> None:
    shape = shape_of(llama(num_hidden_layers=4), name="tiny")
    with pytest.raises(ModelError, match=f"^{says}$"):
        local_split(resolve(tmp_path, ranks="2"), Deployment("tiny", "tiny", split=split), shape)


def test_ranks_that_can_share_a_model_in_no_way_are_refused_with_the_reasons_for_both(tmp_path: Path) -> None:
    model = replace(llama(), unsharable="mlx-lm divides none", uncuttable="layer 0 runs twice")
    settings = resolve_settings({"home": tmp_path, "ranks": 2}, {})
    neither = "no layer of the family 'llama' can be divided among 2 ranks: mlx-lm divides none"
    for parallel, says in (
        ("", f"{neither}; the family 'llama' cannot be cut into 2 stages: layer 0 runs twice"),
        ("tensor", neither),
        ("pipeline", "the family 'llama' cannot be cut into 2 stages: layer 0 runs twice"),
    ):
        with pytest.raises(ModelError) as refused:
            local_split(settings, Deployment("tiny", "tiny", parallel=parallel), shape_of(model))
        assert refused.value.detail == says
