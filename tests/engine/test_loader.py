"""Model folders, whole and broken: a whole model comes out, or words that say what is wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxtp.config import embedded_model_path
from mlxtp.engine import loader
from mlxtp.engine.batch import CacheKind
from mlxtp.engine.group import LoneGroup, alone
from mlxtp.engine.loader import ModelShare, leaves, load, make_cache, read_config
from mlxtp.engine.mtp_head import read_head
from mlxtp.errors import Code, ModelError
from mlxtp.model_files import fingerprint, stray_files
from mlxtp.models.hub_cache import lacks
from mlxtp.models.inspect import weight_bytes

from .families import FAMILIES, OTHERS
from .mtp_heads import add_head
from .small_models import change_config, change_weights, split_weights, write_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "small")


def load_alone(folder: Path) -> ModelShare:
    return load(folder, LoneGroup(), lambda: None)


def test_the_embedded_model_says_what_it_is() -> None:
    loaded = load_alone(embedded_model_path())
    config = read_config(embedded_model_path())
    assert loaded.name == "tiny"
    assert loaded.context == config["max_position_embeddings"]
    assert loaded.vocabulary.size == config["vocab_size"]
    assert loaded.eos == frozenset(config["eos_token_id"])


def test_every_weight_is_in_memory_and_counted(folder: Path) -> None:
    loaded = load_alone(folder)
    stored = mx.load(str(folder / "model.safetensors"))
    assert loaded.weight_bytes == sum(array.nbytes for array in stored.values())
    (folder / "model.safetensors").unlink()
    logits = loaded.model(mx.array([[1, 2, 3]]), cache=make_cache(loaded.model))
    assert logits.shape == (1, 3, 512)
    assert mx.isfinite(logits).all().item()


def test_progress_is_said_after_the_vocabulary_and_each_layer(folder: Path) -> None:
    steps: list[None] = []
    load(folder, LoneGroup(), lambda: steps.append(None))
    assert len(steps) == 1 + 2


def test_weights_in_several_files_are_the_same_model(folder: Path) -> None:
    prompt = mx.array([[3, 1, 4, 1, 5]])
    whole = load_alone(folder).model(prompt)
    mx.eval(whole)
    split_weights(folder, parts=3)
    assert mx.array_equal(whole, load_alone(folder).model(prompt))


def copied(folder: Path, name: str) -> None:
    """Leave an old file of weights under this name, of the same tensors with other numbers."""
    weights = mx.load(str(next(folder.glob("model-00001*.safetensors"))))
    old = {name: weight + 1 for name, weight in weights.items()}
    mx.save_safetensors(str(folder / name), old, metadata={"format": "mlx"})


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors"])
@pytest.mark.parametrize("family", ["llama", "mimo"])
def test_old_files_of_weights_beside_an_index_change_nothing(tmp_path: Path, family: str, name: str) -> None:
    folder = write_model(tmp_path / "m", model_type=family)
    if family == "mimo":
        add_head(folder, (7, 8, 9), length=8)
    prompt = mx.array([[3, 1, 4, 1, 5]])
    split_weights(folder, parts=3)
    before = load(folder, LoneGroup(), lambda: None, (), read_head)
    counted, known = weight_bytes(folder), fingerprint(folder)
    copied(folder, name)
    copied(folder, "consolidated.safetensors")
    found = load(folder, LoneGroup(), lambda: None, (), read_head)
    assert mx.array_equal(before.model(prompt), found.model(prompt))
    if family == "mimo":
        weights, same = (dict(tree_flatten(each.mtp_head.parameters())) for each in (before, found))
        assert weights
        assert all(mx.array_equal(weight, same[name]) for name, weight in weights.items())
    assert (weight_bytes(folder), fingerprint(folder), lacks(folder)) == (counted, known, "")
    assert stray_files(folder) == [name]


def test_one_end_token_may_be_a_plain_number(folder: Path) -> None:
    change_config(folder, eos_token_id=7)
    assert load_alone(folder).eos == {7}
    change_config(folder, eos_token_id=None)
    assert load_alone(folder).eos == frozenset()


def test_a_family_may_leave_its_usual_numbers_out(tmp_path: Path) -> None:
    """Gemma 3 comes with a text_config that holds only what differs from the defaults."""
    text = {"model_type": "gemma3_text", "hidden_size": 16, "intermediate_size": 32, "head_dim": 4}
    folder = write_model(tmp_path / "gemma", **text, vocab_size=262144, sliding_window_pattern=2)
    change_config(folder, vocab_size=None)
    loaded = load_alone(folder)
    assert loaded.vocabulary.size == 262144
    assert loaded.context == 512


def test_the_largest_numbers_are_numbers(folder: Path) -> None:
    """The numbers next to infinity, in each type, and below zero as well."""
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        weight = mx.zeros((64,), dtype=dtype)
        weight[:2] = mx.array([mx.finfo(dtype).max, mx.finfo(dtype).min])
        change_weights(folder, model__norm__weight=weight)
        assert load_alone(folder).vocabulary.size == 512


def test_scales_of_one_byte_are_looked_at(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mxfp4", quantize=32, mode="mxfp4")
    assert load_alone(folder).weight_bytes > 0
    change_weights(folder, model__layers__1__mlp__up_proj__scales=mx.full((128, 2), 255, dtype=mx.uint8))
    with pytest.raises(ModelError, match=r"NaN.*model\.layers\.1\.mlp\.up_proj\.scales"):
        load_alone(folder)


def count_waits(monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    waits = 0
    evaluate = mx.eval

    def counted(*arrays: Any) -> None:
        nonlocal waits
        waits += 1
        evaluate(*arrays)

    with monkeypatch.context() as patched:
        patched.setattr(mx, "eval", counted)
        load_alone(folder)
    return waits


@pytest.mark.parametrize("changes", [{}, {"vocab_size": 1 << 18}])
def test_a_load_waits_for_the_device_once_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int]
) -> None:
    """A wait for each of a layer's nine tensors, or for each part of a large one, costs seconds on a GPU."""
    folder = write_model(tmp_path / "small", dtype=mx.bfloat16, **changes)
    assert count_waits(monkeypatch, folder) == 1 + 2 + 1  # embedding and head, two layers, the rest


def test_one_wait_is_for_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_AT_ONCE", 1000)
    held = mx.zeros((100,))
    mx.eval(held)
    weights = dict.fromkeys("abcde", held)
    assert list(loader._batches("abcde", weights, ranks=2, room=0)) == [["a", "b"], ["c", "d"], ["e"]]


def test_tensors_that_are_cut_take_the_memory_of_whole_ones_meanwhile() -> None:
    """Those of 400 bytes are parts of two tensors of 800; the one in memory takes nothing more."""
    held = mx.zeros((100,))
    mx.eval(held)
    cut = [mx.zeros((100,)) + 1 for _ in range(4)]
    weights = {"a": cut[0], "held": held, "b": cut[1], "c": cut[2], "d": cut[3]}
    assert list(loader._batches(weights, weights, ranks=2, room=1600)) == [["a", "held", "b"], ["c", "d"]]
    assert list(loader._batches(weights, weights, ranks=2, room=100)) == [["a", "held"], ["b"], ["c"], ["d"]]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("bad", [mx.nan, mx.inf, -mx.inf])
def test_what_is_no_number_is_found_in_each_type(folder: Path, dtype: mx.Dtype, bad: float) -> None:
    for others in (1.0, -1.0):
        weight = mx.full((64,), others, dtype=dtype)
        weight[5] = bad
        change_weights(folder, model__norm__weight=weight)
        with pytest.raises(ModelError, match=r"1 tensor holds NaN or infinite numbers: model\.norm\.weight"):
            load_alone(folder)


def test_a_nan_with_a_sign_is_found(folder: Path) -> None:
    weight = mx.zeros((64,), dtype=mx.uint16)
    weight[5] = 0xFFC0
    change_weights(folder, model__norm__weight=weight.view(mx.bfloat16))
    with pytest.raises(ModelError, match="NaN"):
        load_alone(folder)


def test_all_broken_tensors_of_a_layer_are_named(folder: Path) -> None:
    norms = (f"model__layers__1__{which}_layernorm__weight" for which in ("input", "post_attention"))
    change_weights(folder, **dict.fromkeys(norms, mx.full((64,), mx.nan)))
    with pytest.raises(ModelError, match=r"2 tensors hold .*input_layernorm.*, .*post_attention_layernorm"):
        load_alone(folder)


def test_a_whole_model_takes_little_more_than_itself_to_load(folder: Path) -> None:
    loaded = load_alone(folder)
    assert loaded.weight_bytes <= loaded.peak_bytes < 1.15 * loaded.weight_bytes


def test_the_peak_is_that_of_this_load(folder: Path) -> None:
    mx.eval(mx.zeros((10_000_000,)))
    assert load_alone(folder).peak_bytes < 10_000_000


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_5", "longcat_flash_ngram", "deepseek_v32"])
def test_what_a_sequence_holds_is_what_is_counted(tmp_path: Path, family: str) -> None:
    """What a window holds is not counted for each token, but once, with the slots of its ring."""
    loaded = load_alone(write_model(tmp_path / family, model_type=family, **FAMILIES[family]))
    model, per_token, per_row = loaded.model, loaded.kv_token_bytes, loaded.kv_row_bytes
    caches = make_cache(model)
    mx.eval(model(mx.zeros((1, 512), dtype=mx.int32), cache=caches))
    held = sum(cache.nbytes for cache in leaves(caches))
    if (kind := CacheKind(model)).windows:
        batch = kind.empty_batch()
        batch.join(1, caches)
        held = sum(array.nbytes for array in batch.arrays())
    assert held == 512 * per_token + per_row


def test_what_keeps_no_tokens_takes_nothing_for_one(tmp_path: Path) -> None:
    loaded = load_alone(write_model(tmp_path / "mamba", model_type="mamba", **OTHERS["mamba"]))
    assert loaded.kv_token_bytes == 0
    assert loaded.kv_row_bytes > 0


Break = Callable[[Path], object]
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"
#: 2^64 bytes are 0 to MLX, and reading any of them ends the process.
WRAPS = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [65536] * 4, "data_offsets": [0, 0]}})


def written(name: str, data: str | bytes) -> Break:
    return lambda folder: (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)


def removed(name: str) -> Break:
    return lambda folder: (folder / name).unlink()


def cut_off(end: int) -> Break:
    return lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:end])


def changed(**fields: object) -> Break:
    return lambda folder: change_config(folder, **fields)


def weights(**tensors: mx.array | None) -> Break:
    return lambda folder: change_weights(folder, **tensors)


def one_after_the_other(*breaks: Break) -> Break:
    return lambda folder: [each(folder) for each in breaks]


def with_one(value: float, shape: tuple[int, ...], dtype: mx.Dtype = mx.float32) -> mx.array:
    """Random numbers, the last of them `value`."""
    array = mx.random.normal(shape)
    array[tuple(-1 for _ in shape)] = value
    return array.astype(dtype)


def pointers_of_lfs(folder: Path) -> None:
    for path in split_weights(folder):
        path.write_text(POINTER)


CODE_OF_ITS_OWN = one_after_the_other(
    written("evil.py", "raise SystemExit('this ran')"), changed(model_file="evil.py")
)
A_TENSOR_IS_MISSING = weights(model__layers__1__mlp__up_proj__weight=None)
NAN = with_one(mx.nan, (128, 64))
SCALES = weights(model__layers__0__mlp__down_proj__scales=with_one(mx.nan, (64, 4)))
EMBEDDING = weights(model__embed_tokens__weight=with_one(mx.nan, (512, 64), mx.float16))
BROKEN: Mapping[str, tuple[Break, list[str]]] = {
    "config cut off": (written(CONFIG, '{"model_type": "llama",'), ["config.json cannot be read"]),
    "config not text": (written(CONFIG, b"\xff\xfe\x00\x80"), ["config.json cannot be read"]),
    "config a list": (written(CONFIG, "[1, 2]"), ["config.json is not a JSON object"]),
    "config a folder": (
        one_after_the_other(removed(CONFIG), lambda folder: (folder / CONFIG).mkdir()),
        ["config.json cannot be read"],
    ),
    "a file of the index is missing": (
        lambda folder: split_weights(folder, parts=3)[1].unlink(),
        ["lacks 1 of 3", "model-00002-of-00003"],
    ),
    "index cut off": (
        one_after_the_other(split_weights, written(INDEX, '{"weight_map": {')),
        ["index.json cannot be read"],
    ),
    "index in LFS": (written(INDEX, POINTER), ["index.json cannot be read", "pointer of Git LFS"]),
    "config in LFS": (written(CONFIG, POINTER), ["config.json is a pointer of Git LFS", "git lfs pull"]),
    "weights in LFS": (
        pointers_of_lfs,
        ["model-00001-of-00002.safetensors is a pointer of Git LFS", "git lfs pull"],
    ),
    "index of something else": (written(INDEX, '{"weight_map": null}'), ["index.json cannot be read"]),
    "weights cut off": (cut_off(-1000), ["small"]),
    "weights empty": (written(WEIGHTS, ""), ["small", "model.safetensors is damaged: it is empty"]),
    "a shape that wraps to nothing": (
        written(WEIGHTS, struct.pack("<Q", len(WRAPS)) + WRAPS.encode()),
        ["model.safetensors is damaged", "norm.weight"],
    ),
    "a tensor is missing": (A_TENSOR_IS_MISSING, ["Missing 1", "model.layers.1.mlp.up_proj.weight"]),
    "a tensor too many": (
        weights(model__layers__0__mlp__sideways_proj__weight=mx.zeros((4, 4))),
        ["sideways_proj.weight", "not in model"],
    ),
    "a tensor of another shape": (
        weights(model__norm__weight=mx.ones((65,))),
        ["(64", "(65", "model.norm.weight"],
    ),
    "a weight is no number": (
        weights(model__layers__1__mlp__up_proj__weight=NAN),
        ["1 tensor", "NaN", "model.layers.1.mlp.up_proj.weight"],
    ),
    "an embedding is no number": (EMBEDDING, ["NaN", "model.embed_tokens.weight"]),
    "a scale is no number": (
        one_after_the_other(lambda folder: write_model(folder, quantize=32), SCALES),
        ["NaN", "model.layers.0.mlp.down_proj.scales"],
    ),
    "a number is missing": (changed(hidden_size=None), ["hidden_size"]),
    "a number is a word": (changed(num_attention_heads="many"), ["small"]),
    "code of its own": (CODE_OF_ITS_OWN, ["custom module"]),
    "numbers in a list": (changed(text_config=[64, 128]), ["text_config"]),
    "a family that is no model": (changed(model_type="cache"), ["small"]),
    "no config": (removed(CONFIG), ["no config.json", "not a model folder"]),
    "no weights": (removed(WEIGHTS), ["no model*.safetensors"]),
    "a family that ends the process": (changed(model_type="olmo"), ["small", "this family"]),
}
CODES = {
    "no config": Code.MODEL_NOT_FOUND,
    "no weights": Code.MODEL_NOT_FOUND,
    "a family that ends the process": Code.MODEL_UNSUPPORTED,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused_in_plain_words(folder: Path, name: str) -> None:
    spoil, words = BROKEN[name]
    spoil(folder)
    with pytest.raises(ModelError) as refused:
        load_alone(folder)
    assert refused.value.code is CODES.get(name, Code.MODEL_INVALID)
    for word in words:
        assert word in refused.value.detail
    # Several ranks' words must fit one frame, and a log's line.
    assert "\n" not in refused.value.detail
    assert len(refused.value.detail) < 400


def test_code_of_a_model_is_refused_despite_any_default_of_mlx_lm(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.utils import load_model

    CODE_OF_ITS_OWN(folder)
    defaults = load_model.__defaults__
    assert defaults is not None
    assert defaults[-1] is False
    monkeypatch.setattr(load_model, "__defaults__", (*defaults[:-1], True))
    with pytest.raises(ModelError, match="custom module"):
        load_alone(folder)


@pytest.mark.parametrize("disabled", [False, True])
def test_forwards_alone_leave_compiling_as_the_user_wants_it(
    disabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(mx, "disable_compile", lambda: calls.append("off"))
    monkeypatch.setattr(mx, "enable_compile", lambda: calls.append("on"))
    monkeypatch.delenv("MLX_DISABLE_COMPILE", raising=False)
    if disabled:
        monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    with alone(2, compiled=True):
        assert calls == []
    with alone(2, compiled=False):
        assert calls == ["off"]
    assert calls == (["off"] if disabled else ["off", "on"])


@pytest.mark.parametrize(("family", "compiled"), [("llama", True), ("minimax", False)])
def test_forwards_alone_compile_the_kernels_of_the_joint_one(
    tmp_path: Path, family: str, compiled: bool
) -> None:
    """Fused kernels are what a GPU would otherwise compile first in the joint forward."""
    traced = 0

    @mx.compile  # type: ignore[untyped-decorator]
    def fused(x: mx.array) -> mx.array:
        nonlocal traced
        traced += 1
        return mx.exp(x) + 1

    def forwards() -> None:
        mx.eval(fused(mx.ones((3,))), fused(mx.ones((3,))))

    loaded = load_alone(write_model(tmp_path / family, model_type=family, **FAMILIES[family]))
    loader.run_alone(loaded, 2, forwards)
    assert traced == (1 if compiled else 2)  # what is not traced runs each time
