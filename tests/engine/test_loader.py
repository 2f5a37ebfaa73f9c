"""Model folders, whole and broken: a whole model comes out, or words that say what is wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxtp.config import embedded_model_path
from mlxtp.engine import loader
from mlxtp.engine.batch import CacheKind
from mlxtp.engine.group import LoneGroup, alone
from mlxtp.engine.loader import ModelShare, kv_sizes, leaves, load, make_cache, read_config
from mlxtp.engine.mtp_head import read_head
from mlxtp.errors import Code, ModelError
from mlxtp.model_files import fingerprint, stray_files
from mlxtp.models.hub_cache import lacks
from mlxtp.models.inspect import weight_bytes

from .families import FAMILIES
from .mtp_heads import add_head
from .small_models import change_config, change_weights, split_weights, write_config, write_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "small")


def load_alone(folder: Path) -> ModelShare:
    return load(folder, LoneGroup(), lambda: None)


# --- whole ------------------------------------------------------------------------------------------------


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
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "sliding_window_pattern": 2,
        "head_dim": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    folder = write_model(tmp_path / "gemma", **text, vocab_size=262144)
    change_config(folder, vocab_size=None)
    loaded = load_alone(folder)
    assert loaded.vocabulary.size == 262144
    assert loaded.context == 512


def test_quantized_weights_load(tmp_path: Path) -> None:
    loaded = load_alone(write_model(tmp_path / "quantized", quantize=32))
    assert loaded.weight_bytes < load_alone(write_model(tmp_path / "plain")).weight_bytes / 2


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


def test_a_load_waits_for_the_device_once_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for each of a layer's nine tensors costs seconds on a GPU."""
    folder = write_model(tmp_path / "small", dtype=mx.bfloat16)
    assert count_waits(monkeypatch, folder) == 1 + 2 + 1  # embedding and head, two layers, the rest


def test_a_large_tensor_is_checked_in_one_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "large", dtype=mx.bfloat16, vocab_size=1 << 18)
    assert count_waits(monkeypatch, folder) == 1 + 2 + 1


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
    bad = mx.full((64,), mx.nan)
    norms = (
        "model__layers__1__input_layernorm__weight",
        "model__layers__1__post_attention_layernorm__weight",
    )
    change_weights(folder, **dict.fromkeys(norms, bad))
    with pytest.raises(ModelError, match=r"2 tensors hold .*input_layernorm.*, .*post_attention_layernorm"):
        load_alone(folder)


def test_a_whole_model_takes_little_more_than_itself_to_load(folder: Path) -> None:
    loaded = load_alone(folder)
    assert loaded.weight_bytes <= loaded.peak_bytes < 1.15 * loaded.weight_bytes


def test_the_peak_is_that_of_this_load(folder: Path) -> None:
    mx.eval(mx.zeros((10_000_000,)))
    assert load_alone(folder).peak_bytes < 10_000_000


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (2 * 2 * 2 * 16 * 4, 0)),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32},
            (2 * 2 * 16 * 4, 128 * 2 * 2 * 16 * 4),
        ),
        ({"dtype": mx.bfloat16, "num_hidden_layers": 3}, (3 * 2 * 2 * 16 * 2, 0)),
    ],
)
def test_a_token_of_cache_is_layers_keys_and_values(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[int, int]
) -> None:
    """What a window holds is not counted for each token, but once, with the slots of its ring."""
    loaded = load_alone(write_model(tmp_path / "model", **changes))
    assert (loaded.kv_token_bytes, loaded.kv_row_bytes) == expected


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_5", "longcat_flash_ngram", "deepseek_v32"])
def test_what_a_sequence_holds_is_what_is_counted(tmp_path: Path, family: str) -> None:
    model = load_alone(write_model(tmp_path / family, model_type=family, **FAMILIES[family])).model
    per_token, per_row = kv_sizes(model)
    caches = make_cache(model)
    mx.eval(model(mx.zeros((1, 512), dtype=mx.int32), cache=caches))
    held = sum(cache.nbytes for cache in leaves(caches))
    if (kind := CacheKind(model)).windows:
        batch = kind.empty_batch()
        batch.join(1, caches)
        held = sum(array.nbytes for array in batch.arrays())
    assert held == 512 * per_token + per_row


def test_what_keeps_no_tokens_takes_nothing_for_one(tmp_path: Path) -> None:
    folder = write_model(
        tmp_path / "mamba",
        model_type="mamba",
        state_size=8,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        time_step_rank=8,
    )
    loaded = load_alone(folder)
    assert loaded.kv_token_bytes == 0
    assert loaded.kv_row_bytes > 0


# --- broken -----------------------------------------------------------------------------------------------

Break = Callable[[Path], object]


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def config_cut_off(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama",')


def config_not_text(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00\x80")


def config_a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[1, 2]")


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def a_file_of_the_index_is_missing(folder: Path) -> None:
    split_weights(folder, parts=3)[1].unlink()


def index_cut_off(folder: Path) -> None:
    split_weights(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {')


def index_of_something_else(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": None}))


def weights_cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def weights_cut_off_early(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def weights_empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def lfs(folder: Path, name: str) -> None:
    (folder / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n")


def pointers_of_lfs(folder: Path) -> None:
    for path in split_weights(folder):
        lfs(folder, path.name)


def config_in_lfs(folder: Path) -> None:
    lfs(folder, "config.json")


def index_in_lfs(folder: Path) -> None:
    lfs(folder, "model.safetensors.index.json")


def weights_garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"garbage" * 100)


def a_shape_that_wraps_to_nothing(folder: Path) -> None:
    """2^64 bytes are 0 to MLX, and reading any of them ends the process."""
    tensor = {"dtype": "F32", "shape": [65536] * 4, "data_offsets": [0, 0]}
    header = json.dumps({"model.norm.weight": tensor}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def a_tensor_is_missing(folder: Path) -> None:
    change_weights(folder, model__layers__1__mlp__up_proj__weight=None)


def a_tensor_too_many(folder: Path) -> None:
    change_weights(folder, model__layers__0__mlp__sideways_proj__weight=mx.zeros((4, 4)))


def a_weight_is_no_number(folder: Path) -> None:
    change_weights(folder, model__layers__1__mlp__up_proj__weight=with_one(mx.nan, (128, 64)))


def a_weight_is_infinite(folder: Path) -> None:
    change_weights(folder, model__norm__weight=with_one(-mx.inf, (64,), mx.bfloat16))


def an_embedding_is_no_number(folder: Path) -> None:
    change_weights(folder, model__embed_tokens__weight=with_one(mx.nan, (512, 64), mx.float16))


def a_scale_is_no_number(folder: Path) -> None:
    write_model(folder, quantize=32)
    change_weights(folder, model__layers__0__mlp__down_proj__scales=with_one(mx.nan, (64, 4)))


def with_one(value: float, shape: tuple[int, ...], dtype: mx.Dtype = mx.float32) -> mx.array:
    """Random numbers, the last of them `value`."""
    array = mx.random.normal(shape)
    array[tuple(-1 for _ in shape)] = value
    return array.astype(dtype)


def a_tensor_of_another_shape(folder: Path) -> None:
    change_weights(folder, model__norm__weight=mx.ones((65,)))


def fewer_layers_than_weights(folder: Path) -> None:
    change_config(folder, num_hidden_layers=1)


def more_layers_than_weights(folder: Path) -> None:
    change_config(folder, num_hidden_layers=3)


def a_number_is_missing(folder: Path) -> None:
    change_config(folder, hidden_size=None)


def a_number_is_a_word(folder: Path) -> None:
    change_config(folder, num_attention_heads="many")


def numbers_in_a_list(folder: Path) -> None:
    change_config(folder, text_config=[64, 128])


def code_of_its_own(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('this ran')")
    change_config(folder, model_file="evil.py")


def a_family_that_ends_the_process(folder: Path) -> None:
    change_config(folder, model_type="olmo")


def a_family_that_is_no_model(folder: Path) -> None:
    change_config(folder, model_type="cache")


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (without_config, Code.MODEL_NOT_FOUND, ["no config.json", "not a model folder"]),
        (config_cut_off, Code.MODEL_INVALID, ["config.json cannot be read"]),
        (config_not_text, Code.MODEL_INVALID, ["config.json cannot be read"]),
        (config_a_list, Code.MODEL_INVALID, ["config.json is not a JSON object"]),
        (without_weights, Code.MODEL_NOT_FOUND, ["no model*.safetensors"]),
        (a_file_of_the_index_is_missing, Code.MODEL_INVALID, ["lacks 1 of 3", "model-00002-of-00003"]),
        (index_cut_off, Code.MODEL_INVALID, ["index.json cannot be read"]),
        (index_in_lfs, Code.MODEL_INVALID, ["index.json cannot be read", "pointer of Git LFS"]),
        (config_in_lfs, Code.MODEL_INVALID, ["config.json is a pointer of Git LFS", "git lfs pull"]),
        (
            pointers_of_lfs,
            Code.MODEL_INVALID,
            ["model-00001-of-00002.safetensors is a pointer of Git LFS", "git lfs pull"],
        ),
        (index_of_something_else, Code.MODEL_INVALID, ["index.json cannot be read"]),
        (weights_cut_off, Code.MODEL_INVALID, ["small"]),
        (weights_cut_off_early, Code.MODEL_INVALID, ["small"]),
        (weights_empty, Code.MODEL_INVALID, ["small", "model.safetensors is damaged: it is empty"]),
        (weights_garbage, Code.MODEL_INVALID, ["small"]),
        (a_shape_that_wraps_to_nothing, Code.MODEL_INVALID, ["model.safetensors is damaged", "norm.weight"]),
        (a_tensor_is_missing, Code.MODEL_INVALID, ["Missing 1", "model.layers.1.mlp.up_proj.weight"]),
        (a_tensor_too_many, Code.MODEL_INVALID, ["sideways_proj.weight", "not in model"]),
        (a_tensor_of_another_shape, Code.MODEL_INVALID, ["(64", "(65", "model.norm.weight"]),
        (a_weight_is_no_number, Code.MODEL_INVALID, ["1 tensor", "NaN", "model.layers.1.mlp.up_proj.weight"]),
        (a_weight_is_infinite, Code.MODEL_INVALID, ["infinite", "model.norm.weight"]),
        (an_embedding_is_no_number, Code.MODEL_INVALID, ["NaN", "model.embed_tokens.weight"]),
        (a_scale_is_no_number, Code.MODEL_INVALID, ["NaN", "model.layers.0.mlp.down_proj.scales"]),
        (fewer_layers_than_weights, Code.MODEL_INVALID, ["layers.1", "not in model"]),
        (more_layers_than_weights, Code.MODEL_INVALID, ["Missing", "layers.2"]),
        (a_number_is_missing, Code.MODEL_INVALID, ["hidden_size"]),
        (a_number_is_a_word, Code.MODEL_INVALID, ["small"]),
        (code_of_its_own, Code.MODEL_INVALID, ["custom module"]),
        (numbers_in_a_list, Code.MODEL_INVALID, ["text_config"]),
        (a_family_that_is_no_model, Code.MODEL_INVALID, ["small"]),
        (a_family_that_ends_the_process, Code.MODEL_UNSUPPORTED, ["small", "this family"]),
    ],
)
def test_a_broken_folder_is_refused_in_plain_words(
    folder: Path, spoil: Break, code: Code, words: list[str]
) -> None:
    spoil(folder)
    with pytest.raises(ModelError) as refused:
        load_alone(folder)
    assert refused.value.code is code
    for word in words:
        assert word in refused.value.detail
    # Several ranks' words must fit one frame, and a log's line.
    assert "\n" not in refused.value.detail
    assert len(refused.value.detail) < 400


def test_code_of_a_model_is_refused_despite_any_default_of_mlx_lm(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.utils import load_model

    code_of_its_own(folder)
    defaults = load_model.__defaults__
    assert defaults is not None
    assert defaults[-1] is False
    monkeypatch.setattr(load_model, "__defaults__", (*defaults[:-1], True))
    with pytest.raises(ModelError, match="custom module"):
        load_alone(folder)


def test_a_model_that_cannot_be_read_is_the_same_error(tmp_path: Path) -> None:
    folder = tmp_path / "unreadable"
    folder.mkdir()
    (folder / "config.json").mkdir()
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        load_alone(folder)


def test_after_a_refusal_the_next_model_loads(folder: Path, tmp_path: Path) -> None:
    without = write_model(tmp_path / "without")
    a_tensor_is_missing(without)
    with pytest.raises(ModelError):
        load_alone(without)
    assert load_alone(folder).name == "small"


def test_read_config_gives_what_stands_there(tmp_path: Path) -> None:
    write_config(tmp_path, {"model_type": "llama", "x": [1, {"y": None}]})
    assert read_config(tmp_path) == {"model_type": "llama", "x": [1, {"y": None}]}


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
