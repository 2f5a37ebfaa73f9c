"""Language models of mlx-vlm on one rank, in stages and divided among two: the same logits everywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.utils import load_model

from mlxtp import model_sources
from mlxtp.description import from_text
from mlxtp.engine import batch, block_store
from mlxtp.engine.batch import CacheKind
from mlxtp.engine.group import CollectiveCounter, LoneGroup
from mlxtp.engine.loader import load
from mlxtp.engine.pipeline import cut_into_stage
from mlxtp.engine.sharding import family_of
from mlxtp.engine.vlm_models import classes_of
from mlxtp.errors import ModelError
from mlxtp.model_config import VLM_FAMILIES
from mlxtp.models.inspect import check_servable

from .bare_groups import Group, run_group
from .described_models import described
from .own_family_member import LENGTHS, STEPS, chunks, fed, forwards, prompt
from .small_models import write_model
from .test_describe import figures
from .test_pipeline import Place, logits
from .vlm_families import DIVIDED, NEEDS_VLM, RECORDED, VLM, caches_of, recorded, vlm_config

pytestmark = pytest.mark.slow

SIZE = 509
QUANTIZED = {"quantize": 32}
NAMES = [*sorted(VLM), *(f"{family}-4bit" for family in sorted(VLM))]


def write(root: Path, name: str) -> Path:
    family, _, form = name.partition("-")
    fields = {"model_type": family, "vocab_size": SIZE, "tie_word_embeddings": False, "attentive": True}
    return write_model(root / name, **{**fields, **VLM[family], **(QUANTIZED if form else {})})


def whole(folder: Path) -> Any:
    return load_model(folder, lazy=True, get_model_classes=classes_of)[0]


def alone(folder: Path) -> dict[str, np.ndarray]:
    """Logits of the same chunks and tokens as `forwards` has, each row by itself, without the engine."""
    model = whole(folder)
    found: dict[str, Any] = {f"step-{step}": [] for step in range(STEPS)}
    for row in range(len(LENGTHS)):
        cache = model.make_cache()
        for number, chunk in enumerate(chunks(prompt(row, SIZE))):
            found[f"prompt-{row}-{number}"] = model(mx.array([chunk]), cache=cache)[0]
        for step in range(STEPS):
            found[f"step-{step}"].append(model(mx.array([[fed(step, SIZE)[row]]]), cache=cache)[0, 0])
    return {
        name: np.array((mx.stack(each) if isinstance(each, list) else each).astype(mx.float32))
        for name, each in found.items()
    }


@NEEDS_VLM
@pytest.mark.parametrize("family", sorted(VLM))
def test_what_is_computed_depends_on_no_chunks(tmp_path: Path, family: str) -> None:
    """Also where mlx-vlm's own code forgot a group of tokens at each border, or was compiled for others."""
    model = whole(write(tmp_path, family))
    tokens = mx.array([prompt(0, SIZE)])
    expected = np.array(model(tokens, cache=model.make_cache())[0])
    for size in (1, 7, 10):
        cache = model.make_cache()
        parts = [model(tokens[:, at : at + size], cache=cache)[0] for at in range(0, LENGTHS[0], size)]
        np.testing.assert_allclose(np.concatenate(parts), expected, atol=1e-3 * expected.std())


def assert_alike(found: Mapping[str, Any], expected: Mapping[str, np.ndarray]) -> None:
    for name, array in expected.items():
        error = np.sqrt((((found[name] - array) / array.std()) ** 2).mean())
        assert error < 1e-4, (name, error)


@NEEDS_VLM
@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_a_batch_of_unequal_rows_are_as_each_alone(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, name)
    _, found = forwards(load(folder, LoneGroup(), lambda: None), CollectiveCounter())
    assert_alike(found, alone(folder))


@NEEDS_VLM
@pytest.mark.parametrize("name", sorted(VLM))
def test_what_goes_on_from_kept_caches_is_as_from_the_beginning(tmp_path: Path, name: str) -> None:
    """Copies in memory and blocks on disk, and what one of two does leaves the other alone."""
    model = load(write(tmp_path, name), LoneGroup(), lambda: None).model
    kind = CacheKind(model)
    assert kind.can.copyable
    tokens = mx.array([prompt(0, SIZE)])
    caches = kind.new()
    mx.eval(model(tokens[:, :10], cache=caches))
    kept = batch.snapshot(caches, 10)
    items = block_store.block_of(kept, 0, 10, truncatable=False)
    expected = model(tokens[:, 10:], cache=caches)
    for again in (deepcopy(kept), block_store.caches_of(kind.new(), items, 10, truncatable=False), kept):
        assert mx.array_equal(model(tokens[:, 10:], cache=again), expected).item()


@NEEDS_VLM
@pytest.mark.parametrize("name", NAMES)
def test_two_stages_compute_together_what_the_whole_model_does(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, name)
    expected = logits([whole(folder)], [None])
    other = logits([whole(folder)], [None], first=400)
    assert abs(other - expected)[-1].max() > 0.01
    rules, layers = recorded()[name.partition("-")[0]], range(4)
    for border in (1, 2, 3):
        split = (4 - border, border)
        models = [whole(folder), whole(folder)]
        places = [Place(1, 2), Place(0, 2)]
        keepers = set(rules.get("keepers", layers))
        parts = keepers & set(layers[:border]), keepers & set(layers[border:])
        if border in rules.get("joined", ()) or not all(parts):
            refused = places[1] if parts[0] else places[0]
            with pytest.raises(ModelError, match=r"give (their rank more layers|one rank both)"):
                cut_into_stage(models[0], refused, split, 0)  # type: ignore[arg-type]
            continue
        both = zip(models, places, strict=True)
        stages = [cut_into_stage(model, place, split, 0).stage for model, place in both]  # type: ignore[arg-type]
        np.testing.assert_allclose(logits(models, stages), expected, atol=1e-4, err_msg=str(split))
        np.testing.assert_allclose(logits(models, stages, first=400), other, atol=1e-4)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Group:
    root = tmp_path_factory.mktemp("two")
    names = [name for name in NAMES if name.partition("-")[0] in DIVIDED]
    for name in names:
        write(root, name)
    return run_group(root, 2, names, member="tests.engine.own_family_member")


@NEEDS_VLM
@pytest.mark.group
@pytest.mark.parametrize("name", [name for name in NAMES if name.partition("-")[0] in DIVIDED])
def test_two_ranks_compute_what_one_does(two: Group, name: str) -> None:
    each = [
        {what.partition("/")[2]: array for what, array in arrays.items() if what.startswith(f"{name}/")}
        for arrays in two.arrays
    ]
    assert_alike(each[0], alone(two.folder / name))
    tree_map(np.testing.assert_array_equal, each[0], each[1])
    sizes = [facts[name]["weight_bytes"] for facts in two.facts]
    assert max(sizes) < 0.75 * sum(
        array.nbytes for array in mx.load(str(two.folder / name / "model.safetensors")).values()
    )


def record() -> None:
    texts = map(from_text, described(*map(vlm_config, sorted(VLM))))
    lines = [f"{json.dumps(each.family)}: {json.dumps(figures(each))}" for each in texts]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


@NEEDS_VLM
def test_a_family_is_described_with_the_reason_why_it_cannot_be_shared() -> None:
    found = {each.family: each for each in map(from_text, described(*map(vlm_config, VLM)))}
    assert {family: figures(each) for family, each in found.items()} == recorded()
    assert {family for family, each in found.items() if not each.unsharable} == DIVIDED
    assert not [family for family, each in found.items() if each.uncuttable]
    assert [each.caches for each in found.values()] == [caches_of(family) for family in found]
    assert "Attention is not the usual one (attention_sink_bias)" in found["mimo_v2"].unsharable
    assert found.keys() == VLM.keys() == VLM_FAMILIES


@NEEDS_VLM
@pytest.mark.parametrize("family", sorted(VLM))
def test_a_rank_imports_the_family_and_nothing_for_images(tmp_path: Path, family: str) -> None:
    folder = write(tmp_path, family)
    lines = (
        "import json, sys",
        "from pathlib import Path",
        "from mlxtp.engine.group import LoneGroup",
        "from mlxtp.engine.loader import load",
        "from mlxtp.engine.mlx_compat import import_mlx_lm",
        "import_mlx_lm()",
        "load(Path(sys.argv[1]), LoneGroup(), lambda: None)",
        "print(json.dumps(sorted(sys.modules)))",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines), str(folder)], capture_output=True, text=True, check=True
    )
    modules = json.loads(done.stdout.splitlines()[-1])
    tops = {name.partition(".")[0] for name in modules}
    absent = {"PIL", "cv2", "datasets", "huggingface_hub", "pandas", "pyarrow", "requests", "transformers"}
    assert not tops & absent
    assert f"mlx_vlm.models.{family}.language" in modules
    ours = {name.partition(".")[2] for name in modules if name.startswith("mlx_vlm.")}
    assert not ours & {"utils", "generate", "convert", "prompt_utils", "vision_cache", "server"}
    assert not [name for name in ours if "processing" in name]


@pytest.mark.parametrize("check", [family_of, check_servable])
def test_a_model_without_the_extra_is_refused_with_the_command(monkeypatch: Any, check: Any) -> None:
    known = model_sources._families
    monkeypatch.setattr(
        model_sources, "_families", lambda package: known(package) if package == "mlx_lm" else frozenset()
    )
    with pytest.raises(ModelError, match=r"'deepseek_v4' needs mlx-vlm .* pip install 'mlxtp\[vision\]'"):
        check({"model_type": "deepseek_v4"})
    with pytest.raises(ModelError, match=r"mlx-lm has no model family 'no_such_family'$"):
        check({"model_type": "no_such_family"})
