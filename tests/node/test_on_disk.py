"""Which models are said to be on the disk. The cache is laid out as the Hub's library does it."""

from __future__ import annotations

from pathlib import Path

from mlxtp.node.on_disk import OnDisk, models_here


def cached(cache: Path, kind: str, name: str, files: dict[str, bytes]) -> None:
    repo = cache / f"{kind}--{name.replace('/', '--')}"
    commit = "a" * 40
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    for number, (file, content) in enumerate(files.items()):
        blob = repo / "blobs" / f"{number:040x}"
        blob.write_bytes(content)
        (snapshot / file).symlink_to(blob)


WHOLE = {"config.json": b"{}", "model.safetensors": b"x" * 1000}


def test_the_embedded_model_and_what_is_in_the_cache(tmp_path: Path) -> None:
    cached(tmp_path, "models", "org/whole", WHOLE)
    cached(tmp_path, "models", "org/begun", {"config.json": b"{}"})
    cached(tmp_path, "datasets", "org/data", {"data.parquet": b"x"})
    embedded, *hub = models_here(tmp_path)
    assert (embedded.name, embedded.source, embedded.complete) == ("tiny", "embedded", True)
    assert embedded.size_bytes > 1_000_000
    assert hub == [
        OnDisk("org/begun", "hub", 2, complete=False),
        OnDisk("org/whole", "hub", 1002, complete=True),
    ]


def test_no_cache_is_no_error(tmp_path: Path) -> None:
    assert [each.name for each in models_here(tmp_path / "none")] == ["tiny"]


def test_a_cache_that_is_none_leaves_the_embedded_model(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert [each.name for each in models_here(tmp_path / "file")] == ["tiny"]


def test_what_is_broken_in_the_cache_is_left_out(tmp_path: Path) -> None:
    cached(tmp_path, "models", "org/whole", WHOLE)
    (tmp_path / "models--org--broken").mkdir()
    assert [each.name for each in models_here(tmp_path)] == ["tiny", "org/whole"]
