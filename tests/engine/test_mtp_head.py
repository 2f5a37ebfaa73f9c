"""MTP heads on one rank: their proposals, beside the same computed whole, and folders whose head is amiss."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model

from mlxtp.engine.batch import CacheKind, arrays_of
from mlxtp.engine.block_store import BlockStore, Read
from mlxtp.engine.decode_loop import _without_head
from mlxtp.engine.disk_share import DiskShare
from mlxtp.engine.executor import fed
from mlxtp.engine.forwards import BEHIND
from mlxtp.engine.group import CollectiveCounter, LoneGroup
from mlxtp.engine.loader import ModelShare, load
from mlxtp.engine.mtp_head import FAMILIES, MtpHead, accepted, read_head
from mlxtp.engine.runner import Runner
from mlxtp.engine.sampler import Chooser, LogitShaping
from mlxtp.errors import Code, GroupError
from mlxtp.model_config import MTP_PLACES
from mlxtp.model_files import MTP_FILE, has_mtp_head
from mlxtp.wire.messages import DIGEST_BYTES, RESTS, FetchBlocks, Forward, Loaded, Restore, Spill

from ..wire.forwards import of_prompt, of_prompts
from . import families
from .mtp_heads import add_head
from .small_models import change_config, remember, write_model
from .tables import cases, refused

pytestmark = pytest.mark.fault

PROMPT = (7, 8, 9, 10, 11, 12, 13, 14)
OTHER = tuple(Random(3).randrange(6, 500) for _ in range(21))
PLACES = dict.fromkeys(("mimo", "glm4_moe", "qwen3_5"), "model.safetensors")
"""Files of heads that are published in the model's own ones, and that mlx-lm drops whatever the layers."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("models") / family
            sizes = {**families.PIPELINE, **families.FAMILIES}.get(family, {})
            changes = {"tie_word_embeddings": False, **sizes}
            remember(write_model(made[family], model_type=family, attentive=True, **changes))
            add_head(made[family], PROMPT, OTHER, file=PLACES.get(family, MTP_FILE))
        return made[family]

    return folder


GATHERED: dict[str, dict[str, Any]] = {"winners": {}, "logits": {"gathered": (1,)}}
"""Fields of a forward of row 1."""


def loaded_from(folder: Path) -> ModelShare:
    return load(folder, LoneGroup(), lambda: None, (), read_head)


def runner_of(folder: Path, kv_bits: int = 0) -> Runner:
    loaded = loaded_from(folder)
    kind = CacheKind(loaded.model, kv_bits)
    return Runner(loaded, kind, CollectiveCounter(), Chooser(LoneGroup(), LogitShaping()), compiled=True)


def assert_as_whole(
    runner: Runner, uid: int, folder: Path, text: Sequence[int], proposals: Sequence[int]
) -> None:
    """Assert that proposals and the head's entries are those of one forward over all of `text`."""
    found, entries = whole(folder, text, len(proposals))
    assert list(proposals) == found
    length = len(text) - 1
    for own, right in zip(arrays_of(runner._batch.copy(uid, length)[-1:]), entries, strict=True):
        assert mx.allclose(own[..., :length, :], right[..., :length, :], atol=1e-3).item()


def whole(folder: Path, text: Sequence[int], count: int) -> tuple[list[int], list[mx.array]]:
    """Return what the head proposes after `text`, without any cache, and its keys and values."""
    model, _ = load_model(folder)
    head, cache = loaded_from(folder).mtp_head, KVCache()
    inner = getattr(model, "language_model", model)
    output = inner.lm_head if hasattr(inner, "lm_head") else model.model.embed_tokens.as_linear
    hidden = model.model(mx.array([text]))[:, :-1]
    head(hidden, model.model.embed_tokens(mx.array([text[1:]])), cache)
    known = list(text)
    for _ in range(count):
        following = model.model.embed_tokens(mx.array([known[1:]]))
        found = head(hidden, following, None)
        known.append(mx.argmax(output(found[:, -1])).item())
        hidden = mx.concatenate([hidden, found[:, -1:]], axis=1)
    return known[len(text) :], arrays_of([cache])


def right(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """Count the drafts before the first wrong one."""
    return next((at for at, draft in enumerate(drafts) if draft != chosen[at]), len(drafts))


def begun(runner: Runner, prompt: Sequence[int] = PROMPT, uid: int = 1, **how: Any) -> list[int]:
    """Read a prompt whole; returns it with the token behind it."""
    return [*prompt, runner.run(of_prompt(uid, 0, len(prompt), tuple(prompt), **how)).tokens.item()]


def drafted(
    runner: Runner, uid: int, text: list[int], drafts: Sequence[int], **fields: Any
) -> tuple[list[int], list[int]]:
    """Feed the last token of `text` with drafts; returns the text with what was chosen, and proposals."""
    feed = (text[-1], *drafts)
    chosen = runner.run(Forward((uid,), (len(text) - 1,), (len(feed),), feed, drafts=3, **fields))
    (row,) = chosen.tokens.tolist()
    assert chosen.drafts is not None
    return [*text, *row[: right(drafts, row) + 1]], chosen.drafts.tolist()[0]


def plain(text: Sequence[int], widths: tuple[int, ...] = (), fed: Sequence[int] = (), **how: Any) -> Forward:
    return Forward((1,), (len(text) - 1,), widths, tuple(fed), **how)


@pytest.mark.parametrize(
    ("family", "exchange"),
    [
        ("llama", "winners"),
        ("llama", "logits"),
        *((family, "winners") for family in ("deepseek_v3", "qwen3_5", "qwen3_next")),
        *(
            pytest.param(family, how, marks=pytest.mark.chaos)
            for how in ("winners", "logits")
            for family in ("qwen3_5_moe", "qwen3_next", "deepseek_v3", "mimo", "glm4_moe", "glm4_moe_lite")
            if how == "logits" or family not in ("qwen3_5_moe", "qwen3_next", "deepseek_v3")
        ),
    ],
)
def test_proposals_are_those_of_the_whole_text(folders: Any, family: str, exchange: str) -> None:
    """A prompt in chunks, steps with drafts and without, right and wrong ones: no entry is missing."""
    folder = folders(family)
    runner, how = runner_of(folder), GATHERED[exchange]
    runner.run(of_prompt(1, 0, 21, OTHER[:9], following=OTHER[9]))
    chosen = runner.run(of_prompt(1, 9, 21, OTHER[9:], drafts=1, **how))
    assert chosen.drafts is not None
    text, proposals = [*OTHER, chosen.tokens.item()], chosen.drafts.tolist()[0]
    assert_as_whole(runner, 1, folder, text, proposals)
    for turn in range(9):
        if turn % 4 == 2:  # steps that propose nothing, the second of which feeds what is in the graph
            text, proposals = [*text, runner.run(plain(text, (1,), text[-1:], **how)).tokens.item()], []
            text.append(runner.run(plain(text, **how)).tokens.item())
        text, proposals = drafted(runner, 1, text, proposals, **how)
        assert_as_whole(runner, 1, folder, text, proposals)
        if turn % 5 == 4:
            proposals = [proposals[0], 499, 498]


@pytest.mark.parametrize("gathered", [(), (2,), (1, 2)])
def test_rows_of_unlike_lengths_get_their_own_proposals(folders: Any, gathered: tuple[int, ...]) -> None:
    folder, how = folders("llama"), {"gathered": gathered}
    runner = runner_of(folder)
    chosen = runner.run(of_prompts((1, 2), (8, 21), (0, 0), (*PROMPT, *OTHER), drafts=1, **how))
    texts = [
        [*prompt, token] for prompt, (token,) in zip((PROMPT, OTHER), chosen.tokens.tolist(), strict=True)
    ]
    assert chosen.drafts is not None
    feeds = chosen.drafts.tolist()
    assert feeds == [whole(folder, text, 1)[0] for text in texts]
    for turn in range(8):
        if turn == 3:
            runner.arrange((64, 64))
        feed_all = [[text[-1], *feed] for text, feed in zip(texts, feeds, strict=True)]
        at, fed_all = tuple(len(text) - 1 for text in texts), tuple(chain(*feed_all))
        chosen = runner.run(Forward((1, 2), at, tuple(map(len, feed_all)), fed_all, drafts=2, **how))
        assert chosen.drafts is not None
        for text, feed, row in zip(texts, feeds, chosen.tokens.tolist(), strict=True):
            text.extend(row[: right(feed, row) + 1])
        feeds = chosen.drafts.tolist()
        for uid, text, feed in zip((1, 2), texts, feeds, strict=True):
            assert_as_whole(runner, uid, folder, text, feed)
        if turn % 2:
            feeds[turn % 4 // 2] = []


@pytest.mark.parametrize("exchange", ["winners", "logits"])
def test_steps_without_drafts_leave_no_holes(folders: Any, exchange: str) -> None:
    """More of them than the head gets together."""
    folder, how = folders("llama"), GATHERED[exchange]
    runner = runner_of(folder)
    text = begun(runner, **how)
    for _ in range(BEHIND + 5):
        text.append(runner.run(plain(text, **how)).tokens.item())
    text, proposals = drafted(runner, 1, text, (), **how)
    assert_as_whole(runner, 1, folder, text, proposals)


@pytest.mark.parametrize("exchange", ["winners", "logits"])
def test_a_token_is_embedded_once(folders: Any, exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the head and the next step alike: on several ranks, each time takes a sum of all of them."""
    runner, how = runner_of(folders("llama")), GATHERED[exchange]
    text = begun(runner, **how)
    text.append(runner.run(plain(text, **how)).tokens.item())  # traced
    embedded: list[mx.array] = []
    kind: Any = type(runner._vocabulary.embedding)
    call = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda own, tokens: embedded.append(tokens) or call(own, tokens))
    for _ in range(5):
        text.append(runner.run(plain(text, **how)).tokens.item())
    assert len(embedded) == (5 if exchange == "logits" else 0), "those of winners come with them"


@pytest.mark.parametrize("exchange", ["winners", "logits"])
def test_a_head_that_rests_gets_no_entries_and_changes_no_token(folders: Any, exchange: str) -> None:
    folder, how = folders("llama"), GATHERED[exchange]
    runs = []
    for rests in (False, True):
        runner = runner_of(folder)
        text = begun(runner, **how)
        asked: Any = {**how, "drafts": RESTS if rests else 0}
        for _ in range(BEHIND + 2):
            text.append(runner.run(plain(text, **asked)).tokens.item())
        (chosen,) = runner.run(plain(text, (2,), (text[-1], text[-1]), **asked)).tokens.tolist()
        runs.append([*text, chosen[0]])
        head = arrays_of(runner._batch.copy(1, len(text))[-1:])
        assert [bool(mx.any(each[..., 8:, :]).item()) for each in head] == [not rests] * len(head)
        assert all(bool(mx.any(each[..., :8, :]).item()) for each in head), "the prompt's stay"
    assert runs[0] == runs[1]


def test_a_kept_cache_has_the_head_s_entries(folders: Any) -> None:
    folder = folders("llama")
    runner = runner_of(folder)
    first = runner.run(of_prompt(1, 0, 8, PROMPT)).tokens.item()
    runner.run(Forward((1,), (8,)))
    runner.stop(1, 8)
    longer = (*PROMPT, first, 33, 44)
    token = runner.run(of_prompt(2, 8, 11, longer[8:], source=1, take=True)).tokens.item()
    text, proposals = drafted(runner, 2, [*longer, token], ())
    assert_as_whole(runner, 2, folder, text, proposals)


def disk_of(runner: Runner, folder: Path, post: Any) -> DiskShare:
    return DiskShare(runner, runner._caches, BlockStore(folder, "layout", {}, 1 << 24, post), post)


def test_a_cache_from_disk_has_the_head_s_entries(folders: Any, tmp_path: Path) -> None:
    """Blocks of a prompt that is being computed, and of a row whose last steps computed no drafts."""
    folder, words = folders("llama"), SimpleQueue[Any]()
    runner, digests = runner_of(folder), [bytes([number]) * DIGEST_BYTES for number in range(3)]
    disk = disk_of(runner, tmp_path, words.put)
    runner.run(of_prompt(1, 0, 21, OTHER[:9], following=OTHER[9]))
    disk.spill(Spill(1, 0, 8, digests[0]))
    text = [*OTHER, runner.run(of_prompt(1, 9, 21, OTHER[9:])).tokens.item()]
    for _ in range(5):
        text.append(runner.run(plain(text)).tokens.item())
    disk.spill(Spill(1, 8, 16, digests[1], digests[0]))
    disk.spill(Spill(1, 16, 24, digests[2], digests[1]))
    disk.close()
    runner = runner_of(folder)
    disk = disk_of(runner, tmp_path, words.put)
    disk.fetch(FetchBlocks(7, 8, b"".join(digests)))
    read = next(word for word in iter(words.get, None) if isinstance(word, Read))
    assert disk.arrived(read) == (7, 3)
    disk.restore(Restore(7, 3))
    token = runner.run(of_prompt(2, 24, 27, tuple(text[24:]), source=7)).tokens.item()
    text, proposals = drafted(runner, 2, [*text, token], ())
    assert_as_whole(runner, 2, folder, text, proposals)


def test_quantized_caches_hold_the_head_s_entries(folders: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "head_dim": 64}
    folder = add_head(write_model(tmp_path / "wide", attentive=True, **sizes), PROMPT)
    runner = runner_of(folder, kv_bits=8)
    text, proposals = drafted(runner, 1, begun(runner), ())
    assert len(proposals) == 3
    text, _ = drafted(runner, 1, text, proposals)


def test_a_rank_without_the_head_finds_a_step_with_drafts_wrong(folders: Any) -> None:
    loaded = load(folders("llama"), LoneGroup(), lambda: None)
    chooser = Chooser(LoneGroup(), LogitShaping())
    runner = Runner(loaded, CacheKind(loaded.model), CollectiveCounter(), chooser, compiled=True)
    runner.run(of_prompt(1, 0, 8, PROMPT))
    with refused(GroupError, Code.DESYNC):
        runner.run(Forward((1,), (8,), drafts=1))


def test_right_drafts_are_counted_up_to_the_first_wrong_one_and_within_the_row() -> None:
    given = mx.array([[5, 6, 7, 8], [5, 6, 9, 8], [5, 6, 7, 8], [5, 4, 7, 8]])
    chosen = mx.array([[6, 7, 8, 1]] * 4)
    counts = mx.array([4, 4, 2, 4], dtype=mx.int32)
    assert accepted(given, chosen, counts).tolist() == [3, 1, 1, 0]
    assert accepted(given[:, :1], chosen[:, :1], mx.ones(4, dtype=mx.int32)).tolist() == [0, 0, 0, 0]


def test_ranks_that_propose_more_or_read_another_next_token_have_other_digests() -> None:
    step, prompt = Forward((1,), (8,), drafts=1), of_prompt(1, 0, 8, PROMPT[:4], following=PROMPT[4])
    assert len({fed(replace(step, drafts=drafts)) for drafts in (RESTS, 0, 2)}) == 3
    assert fed(prompt) != fed(of_prompt(1, 0, 8, PROMPT[:4], following=PROMPT[5]))
    assert fed(prompt) != fed(replace(prompt, drafts=1))


def test_each_family_has_names_and_a_place() -> None:
    assert FAMILIES.keys() == MTP_PLACES.keys()


@pytest.mark.parametrize("family", ["llama", "mimo", "qwen3_5"])
def test_a_head_is_seen_without_mlx(folders: Any, tmp_path: Path, family: str) -> None:
    folder = folders(family)
    config = json.loads((folder / "config.json").read_text())
    assert has_mtp_head(folder, config)
    none = {"num_nextn_predict_layers": 0, "mtp_num_hidden_layers": 0}
    assert not has_mtp_head(folder, config | none | {"text_config": config.get("text_config", {}) | none})
    assert not has_mtp_head(write_model(tmp_path / "none", model_type=family), config)


def with_tensors(source: Path, folder: Path, **changes: mx.array | None) -> Path:
    """Return a copy of a folder, some tensors of whose head are others; None leaves one out."""
    shutil.copytree(source, folder)
    tensors = dict(mx.load(str(folder / MTP_FILE)))
    mx.eval(tensors)
    for name, array in changes.items():
        tensors[f"model.layers.2.{name.replace('__', '.')}"] = array
    mx.save_safetensors(str(folder / MTP_FILE), {n: a for n, a in tensors.items() if a is not None})
    return folder


def other_file(folder: Path, source: Path, cut: int | None) -> Path:
    """Return a copy of a folder whose head's file lacks its last bytes, or all of it."""
    shutil.copytree(source, folder)
    whole_file = (folder / MTP_FILE).read_bytes()
    (folder / MTP_FILE).unlink()
    if cut is not None:
        (folder / MTP_FILE).write_bytes(whole_file[:cut])
    return folder


@cases(
    "make, says",
    {
        "a tensor is missing": (partial(with_tensors, eh_proj__weight=None), "projection.weight"),
        "of another shape": (partial(with_tensors, hnorm__weight=mx.ones(32)), "hidden_norm.weight"),
        "one too many": (partial(with_tensors, strange__weight=mx.ones(3)), "strange"),
        "no numbers": (
            partial(with_tensors, hnorm__weight=mx.full(64, mx.nan)),
            "1 tensor holds NaN or infinite numbers: hidden_norm.weight",
        ),
        "damaged": (partial(other_file, cut=-7), ""),
        "dropped by a conversion": (partial(other_file, cut=None), None),
    },
)
def test_a_model_with_a_head_that_does_not_fit_is_served_without_it(
    folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, says: str | None
) -> None:
    """With one line, unless there is no head at all."""
    folder = make(source=folders("llama"), folder=tmp_path / "bad")
    assert loaded_from(folder).mtp_head is None
    said = capsys.readouterr().err.splitlines()
    assert len(said) == (says is not None)
    for line in said:
        assert line.startswith("bad is served without its MTP head: ")
        assert str(says) in line


def test_only_the_rank_of_a_pipeline_that_chooses_reads_the_head(folders: Any, tmp_path: Path) -> None:
    """Whether it holds numbers matters to no other rank, and shows on this one before the model is cut."""
    bad = with_tensors(folders("llama"), tmp_path / "bad", hnorm__weight=mx.full(64, mx.inf))
    for folder, heads in ((folders("llama"), [True, False]), (bad, [False, False])):
        shares = [load(folder, _Place(rank), lambda: None, (1, 1), read_head) for rank in range(2)]
        assert [share.mtp_head is not None for share in shares] == heads
        assert [share.vocabulary.embedding is not None for share in shares] == [heads[0], True]


class _Place(LoneGroup):
    """The place of a rank of two."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_a_rank_without_memory_for_the_head_does_not_go_on_without_it(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks have it."""

    def read(*_: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr("mlxtp.engine.mtp_head.read_numbers", read)
    with refused(GroupError, Code.OUT_OF_MEMORY, "no room"):
        loaded_from(folders("llama"))


def test_a_head_counts_as_weights_and_in_the_caches(folders: Any) -> None:
    with_head, without = loaded_from(folders("llama")), load(folders("llama"), LoneGroup(), lambda: None)
    size = (folders("llama") / MTP_FILE).stat().st_size
    assert 0 <= size - (with_head.weight_bytes - without.weight_bytes) < 4096  # the header
    assert with_head.kv_token_bytes == without.kv_token_bytes * 3 // 2


def test_a_quantized_head_is_read_as_its_model_is(folders: Any, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "quantized", attentive=True, quantize=32)
    add_head(folder, PROMPT)
    tensors = dict(mx.load(str(folder / MTP_FILE)))
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        packed, scales, biases = mx.quantize(tensors.pop(name), group_size=32, bits=8)
        stem = name.removesuffix("weight")
        tensors |= {name: packed, f"{stem}scales": scales, f"{stem}biases": biases}
    mx.eval(tensors)
    mx.save_safetensors(str(folder / MTP_FILE), tensors)
    head = loaded_from(folder).mtp_head
    assert isinstance(head, MtpHead)
    assert (head.projection.bits, head.layer.self_attn.q_proj.bits) == (8, 8)


def head_of(folder: Path, family: str, prefix: str) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Return the file with a head, its other tensors, and those of the head."""
    path = folder / PLACES.get(family, MTP_FILE)
    stored: dict[str, Any] = dict(mx.load(str(path)))
    mx.eval(stored)
    return path, stored, {name: stored.pop(name) for name in list(stored) if name.startswith(prefix)}


def assert_same_head(one: Path, other: Path) -> None:
    want, got = (dict(tree_flatten(loaded_from(each).mtp_head.parameters())) for each in (one, other))
    assert want.keys() == got.keys()
    assert all(mx.allclose(want[name], got[name], atol=1e-6).item() for name in want)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_head_is_read_as_it_is_published(folders: Any, tmp_path: Path, family: str) -> None:
    """Experts one by one, compressed projections as one, copies of embedding and output head."""
    shutil.copytree(folders(family), folder := tmp_path / family)
    path, stored, head = head_of(folder, family, "model.layers.2.")
    at = "model.layers.2.self_attn"
    if f"{at}.embed_q.weight" in head:
        keys, values = (head.pop(f"{at}.{name}.weight") for name in ("embed_q", "unembed_out"))
        both = mx.concatenate([keys.swapaxes(1, 2), values], axis=1)
        head[f"{at}.kv_b_proj.weight"] = both.reshape(-1, both.shape[-1])
    for name in [name for name in head if ".switch_mlp." in name]:
        for number, expert in enumerate(head.pop(name)):
            head[name.replace("switch_mlp", f"experts.{number}")] = expert
    head["model.layers.2.embed_tokens.weight"] = mx.zeros((512, 64))
    head["model.layers.2.shared_head.head.weight"] = mx.zeros((512, 64))
    published = {**stored, **{name: mx.contiguous(weight) for name, weight in head.items()}}
    mx.save_safetensors(str(path), published, metadata={"format": "mlx"})
    assert_same_head(folders(family), folder)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize("raw", ["", "layer", "all"])
def test_a_head_of_qwen_is_read_as_it_is_published_or_converted(
    folders: Any, tmp_path: Path, family: str, raw: str
) -> None:
    """Norms less one, all or those of the layer; experts as one or one by one; below the language model."""
    shutil.copytree(folders(family), folder := tmp_path / family)
    path, stored, head = head_of(folder, family, "mtp.")
    small = {name for name in head if "pre_fc_norm" in name}
    head |= {name: 0.4 * head[name] for name in small}
    shutil.copytree(folder, like := tmp_path / "like")
    mx.save_safetensors(str(like / path.name), {**stored, **head}, metadata={"format": "mlx"})
    norms = [name for name in head if "norm" in name]
    assert len(norms) == 7
    less = norms if raw == "all" else small.union([n for n in norms if ".layers." in n]) if raw else ()
    head |= {name: head[name] - 1 for name in less}
    if raw:
        experts = "mtp.layers.0.mlp.switch_mlp"
        parts = {name: head.pop(name) for name in list(head) if name.startswith(experts)}
        if family == "qwen3_5_moe":
            both = [parts.pop(f"{experts}.{name}_proj.weight") for name in ("gate", "up")]
            head["mtp.layers.0.mlp.experts.gate_up_proj"] = mx.concatenate(both, axis=-2)
            head["mtp.layers.0.mlp.experts.down_proj"] = parts.pop(f"{experts}.down_proj.weight")
        for name, weight in parts.items():
            head |= {name.replace("switch_mlp", f"experts.{n}"): each for n, each in enumerate(weight)}
    else:
        head = {f"language_model.{name}": weight for name, weight in head.items()}
    published = {name: mx.contiguous(weight) for name, weight in {**stored, **head}.items()}
    mx.save_safetensors(str(path), published, metadata={"format": "mlx"})
    assert_same_head(like, folder)


def test_a_head_computes_in_its_model_s_types(folders: Any, tmp_path: Path) -> None:
    """A head of another type than its model's, too."""
    for kind in (mx.bfloat16, mx.float32):
        folder = write_model(tmp_path / str(kind), attentive=True, dtype=mx.bfloat16)
        shutil.copy(folders("llama") / MTP_FILE, folder / MTP_FILE)
        change_config(folder, num_nextn_predict_layers=1)
        with_tensors_of(folder, kind)
        runner = runner_of(folder)
        text, proposals = drafted(runner, 1, begun(runner), ())
        drafted(runner, 1, text, proposals)
        assert {array.dtype for array in runner._batch.every[0].arrays[-2:]} == {kind}  # type: ignore[union-attr]


def with_tensors_of(folder: Path, kind: mx.Dtype) -> None:
    tensors = {name: array.astype(kind) for name, array in mx.load(str(folder / MTP_FILE)).items()}
    mx.eval(tensors)
    mx.save_safetensors(str(folder / MTP_FILE), tensors)


def test_ranks_of_which_some_lack_the_head_are_named() -> None:
    loads = {rank: Loaded(100, 512, 1, (1,), mtp=rank != 1) for rank in range(3)}
    assert list(_without_head(loads)) == [1]
    assert _without_head({rank: replace(load, mtp=True) for rank, load in loads.items()}) == {}
    stages = {rank: replace(load, layers=(rank,), mtp=rank == 0) for rank, load in loads.items()}
    assert _without_head(stages) == {}
