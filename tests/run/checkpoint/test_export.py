"""Weights leave as `transformers` reads them, from the checkpoint alone."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from layouts import Cut, ThreadRanks, one_shard, shards_of
from safetensors.torch import load_file
from torch import Tensor, nn

from weft.config.recipe import DecoderShape
from weft.errors import CheckpointError
from weft.model.blueprint import Blueprint
from weft.model.build import build_reference
from weft.model.losses import class_loss
from weft.run.checkpoint import Checkpointer, Peers
from weft.run.checkpoint.export import ExportedWeights, export_checkpoint, read_tensors

DECODER = DecoderShape(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    vocabulary_size=96,
    sequence_length=16,
    tie_embeddings=True,
)


def weights_of(blueprint: Blueprint) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(parameter.shape, generator=generator) * 0.1
        for name, parameter in blueprint.module.named_parameters()
    }


def save_in_parts(folder: Path, weights: dict[str, Tensor]) -> Path:
    """Save as two ranks that cut each tensor somewhere."""

    def save(peers: Peers) -> Path:
        cut = Cut(bounds=(0.37,))
        shards = [
            shard
            for name, tensor in weights.items()
            for shard in shards_of(f"model/{name}", tensor, cut, peers.rank, filled=True)
        ]
        return Checkpointer(folder, peers).save(3, shards)

    return ThreadRanks().run(2, save)[0]


def small_model() -> Blueprint:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    return Blueprint(module=module, inputs={"input": "images"}, loss=class_loss, initialise=None)


def save_small(folder: Path, *, average: bool = False) -> dict[str, Tensor]:
    module = small_model().module
    weights = dict(module.named_parameters())
    shards = [one_shard(f"model/{name}", tensor.detach()) for name, tensor in weights.items()]
    shards += [one_shard(f"buffer/{name}", tensor) for name, tensor in module.named_buffers()]
    if average:
        shards += [one_shard(f"average/{name}", tensor.detach() + 1) for name, tensor in weights.items()]
    Checkpointer(folder).save(1, shards)
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


def test_transformers_load_a_decoder_and_compute_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    blueprint = build_reference(DECODER)
    weights = weights_of(blueprint)
    save_in_parts(tmp_path / "run" / "checkpoints", weights)
    folder = export_checkpoint(tmp_path / "run", blueprint, tmp_path / "run" / "export")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        ours = torch.func.functional_call(blueprint.module.eval(), weights, tokens)
        torch.testing.assert_close(loaded(tokens).logits, ours if isinstance(ours, Tensor) else ours.logits)


def test_names_buffers_and_config_as_the_model_has_them(tmp_path: Path) -> None:
    expected = save_small(tmp_path / "checkpoints")
    blueprint = small_model()
    blueprint.export_config = {"model_type": "small"}
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    export_checkpoint(tmp_path, blueprint, tmp_path / "export", tokenizer=tokenizer)
    actual = load_file(tmp_path / "export" / "model.safetensors")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert json.loads((tmp_path / "export" / "config.json").read_text()) == {"model_type": "small"}
    assert (tmp_path / "export" / "tokenizer.json").read_text() == "{}"


def test_large_weights_are_written_to_several_files(tmp_path: Path) -> None:
    expected = save_small(tmp_path / "checkpoints")
    folder = export_checkpoint(tmp_path, small_model(), tmp_path / "export", file_bytes=30)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(expected)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(folder / file)[name], expected[name])
    assert not (folder / "model.safetensors").exists()


def test_the_average_is_exported_when_there_is_one(tmp_path: Path) -> None:
    save_small(tmp_path / "without")
    with pytest.raises(CheckpointError, match="has no moving average: .* no optimizer.average_decay"):
        export_checkpoint(tmp_path / "without", small_model(), tmp_path / "x", use_average=True)
    expected = save_small(tmp_path / "with", average=True)
    folder = export_checkpoint(tmp_path / "with", small_model(), tmp_path / "x", use_average=True, dtype=torch.bfloat16)
    actual = load_file(folder / "model.safetensors")
    assert torch.equal(actual["0.weight"], (expected["0.weight"] + 1).bfloat16())
    assert torch.equal(actual["1.running_var"], expected["1.running_var"].bfloat16())
    assert actual["1.num_batches_tracked"].dtype == torch.int64


def test_an_export_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    save_small(tmp_path / "checkpoints")
    other = Blueprint(module=nn.Linear(2, 2), inputs={}, loss=class_loss, initialise=None)
    with pytest.raises(CheckpointError, match=r"lacks 2 of the model's 2 parameters \(bias, weight\)"):
        export_checkpoint(tmp_path, other, tmp_path / "export")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(CheckpointError, match="is not empty. Export into a new folder"):
        export_checkpoint(tmp_path, small_model(), tmp_path / "full")
    with pytest.raises(CheckpointError, match="cannot be written: Not a directory"):
        export_checkpoint(tmp_path, small_model(), tmp_path / "full" / "mine" / "export")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "full"]


def test_tensors_are_read_one_at_a_time_by_prefix(tmp_path: Path) -> None:
    expected = save_small(tmp_path)
    assert {name for name, _ in read_tensors(tmp_path, "buffer/")} == {name for name in expected if "1." in name} - {
        "1.weight",
        "1.bias",
    }


# ── exporters that rename and join ────────────────────────────────────────────────────────────────────────────────────


class Watched:
    """Weights that know how many of them are alive at a time."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(2)
        self._tensors = {f"layer{at}.experts": torch.randn(3, 4, 2, generator=made) for at in range(4)}
        self._tensors["bias"] = torch.randn(5, generator=made)
        self.alive: list[weakref.ref[Tensor]] = []
        self.read, self.most = list[str](), 0

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name].clone()
        self.alive = [each for each in self.alive if each() is not None] + [weakref.ref(tensor)]
        self.read.append(name)
        self.most = max(self.most, len(self.alive))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> torch.Size:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype


def by_expert(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cut, joined, transposed, dropped, made up, twice the same."""
    results = dict[str, Tensor]()
    for name, tensor in weights.items():
        if name == "bias":
            results |= {"a": tensor, "b": tensor.clone(), "c": tensor.new_zeros(2), "d": torch.ones(2) * 3}
        elif name != "layer3.experts":
            for index, one in enumerate(tensor.unbind(0)):
                left, right = one.chunk(2)
                results[f"{name}.{index}.left"] = left.contiguous()
                results[f"{name}.{index}.both"] = torch.cat([right.t(), left.t()]).double()
    return results


def test_weights_are_cut_and_renamed_one_at_a_time() -> None:
    weights = Watched()
    expected = by_expert({name: weights[name] for name in weights})
    weights.read, weights.most, weights.alive = [], 0, []
    renamed = ExportedWeights(weights, by_expert)
    assert weights.read == []
    assert list(renamed) == list(expected)
    for name in renamed:
        assert (renamed.shape(name), renamed.dtype(name)) == (expected[name].shape, expected[name].dtype)
        assert torch.equal(renamed[name], expected[name])
    assert weights.read == ["layer0.experts", "layer1.experts", "layer2.experts", "bias"]
    assert weights.most == 1


def in_place(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone().mul_(2) for name, tensor in weights.items()}


def with_a_look(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if tensor.sum().item() > 0}


def with_numpy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(tensor.numpy()[::-1].copy()) for name, tensor in weights.items()}


def without_copies(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict({tensor.data_ptr(): (name, tensor) for name, tensor in weights.items()}.values())


@pytest.mark.parametrize("exporter", [in_place, with_a_look, with_numpy, without_copies])
def test_an_exporter_that_needs_content_gets_it(
    exporter: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
) -> None:
    weights = Watched()
    expected = exporter({name: weights[name] for name in weights})
    renamed = ExportedWeights(weights, exporter)
    assert list(renamed) == list(expected)
    assert all(torch.equal(renamed[name], expected[name]) for name in expected)


def test_what_is_wrong_with_an_exporter_is_its_own_error() -> None:
    with pytest.raises(KeyError, match="there is no such"):
        ExportedWeights(Watched(), lambda weights: {"x": weights["there is no such"]})
    with pytest.raises(RuntimeError, match="mat1 and mat2|size"):
        ExportedWeights(Watched(), lambda weights: {"x": weights["bias"][None] @ weights["bias"][None]})
