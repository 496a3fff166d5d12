"""Folders of models that are damaged or made to do harm: an error that names the file, and nothing outside is read."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from forge import forgeries, text_of
from model_kit import hf_config, real
from safetensors.torch import save_file

from weft.config.recipe import ModelRecipe
from weft.errors import RecipeError, WeftError
from weft.model.hf import build_hf
from weft.model.reference.factory import build_factory


def build(folder: Path) -> dict[str, torch.Tensor]:
    return dict(real(build_hf(ModelRecipe(hf=str(folder)))).state_dict())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama with its weights in two shards and an index."""
    home = tmp_path / "model"
    hf_config("llama").save_pretrained(home)
    weights = {name: tensor.clone() for name, tensor in build(home).items()}
    names = sorted(weights)
    where = {name: f"model-0000{1 + at % 2}-of-00002.safetensors" for at, name in enumerate(names)}
    for file in sorted(set(where.values())):
        save_file({name: weights[name] for name in names if where[name] == file}, home / file, {"format": "pt"})
    (home / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return home


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/x.safetensors", "C:\\x.safetensors", "..", 3]
)
def test_a_weight_map_stays_in_its_folder(folder: Path, name: Any) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first = min(content["weight_map"])
    (folder.parent / "x.safetensors").write_bytes((folder / content["weight_map"][first]).read_bytes())
    content["weight_map"][first] = name
    index.write_text(json.dumps(content))
    with pytest.raises(RecipeError, match=r"index.json: weight_map\..* is .*, but should be"):
        build(folder)


def test_links_lead_out_only_within_the_hub_s_cache(folder: Path) -> None:
    snapshots, blobs = folder.parent / "cache" / "snapshots", folder.parent / "cache" / "blobs"
    snapshots.mkdir(parents=True)
    blobs.mkdir()
    folder = folder.rename(snapshots / "revision")
    shard = folder / "model-00001-of-00002.safetensors"
    shard.rename(blobs / "abc")
    shard.symlink_to("../../blobs/abc")
    build(folder)
    (blobs / "abc").rename(folder.parent.parent.parent / "elsewhere.safetensors")
    shard.unlink()
    shard.symlink_to(folder.parent.parent.parent / "elsewhere.safetensors")
    with pytest.raises(RecipeError, match="outside the folder"):
        build(folder)


@pytest.mark.parametrize("seed", range(2))
def test_drawn_damage_is_an_error_that_names_the_folder(folder: Path, seed: int) -> None:
    draw, whole = random.Random(seed), build(folder)
    for file in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json"):
        path, original = folder / file, (folder / file).read_bytes()
        changes = [original[: draw.randrange(len(original))], b"", os.urandom(64), b"[" * 50_000, b"\xff" * 9]
        if file.endswith(".json"):
            changes += [text_of(changed) for _, changed in forgeries(json.loads(original), seed, 1)]
        for content in draw.sample(changes, min(len(changes), 25)):
            path.write_bytes(content)
            try:
                found = build(folder)
            except WeftError as problem:
                text = str(problem)
                assert str(folder) in text or "config" in text, text  # noqa: PT017 - what is accepted is looked at, too
                continue
            if file != "config.json":
                assert all(torch.equal(found[name], whole[name]) for name in whole)
        path.write_bytes(original)


@pytest.mark.parametrize("rate", [1e300, -0.5, 1.5])
def test_a_rate_that_is_none_is_refused(folder: Path, rate: float) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "attention_dropout": rate}))
    with pytest.raises(RecipeError, match="cannot construct .* from its config: dropout probability"):
        build(folder)


@pytest.mark.parametrize("path", ["os:system", "subprocess:run", "builtins:eval", "shutil:rmtree"])
def test_python_s_own_library_is_not_called(path: str, tmp_path: Path) -> None:
    recipe = ModelRecipe(factory=path, arguments={"command": f"touch {tmp_path}/done"})
    with pytest.raises(RecipeError, match=r"makes no models: .*command='touch .*was not called"):
        build_factory(recipe)
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize(
    "path", ["torch:Generator", "torch:manual_seed_all_of_it", "torch:save", "torch.nn.functional:relu"]
)
def test_what_makes_other_things_is_not_called(path: str) -> None:
    with pytest.raises(RecipeError, match="model.factory = "):
        build_factory(ModelRecipe(factory=path))
