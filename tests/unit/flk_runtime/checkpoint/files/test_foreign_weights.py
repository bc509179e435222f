"""Weights that somebody gives: flk's own are compared with their checksums, and a stranger's stay in their folder."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from flk_runtime.checkpoint.files import Weights, safetensors
from flk_runtime.checkpoint.state import chunks_of
from flk_runtime.errors import CheckpointError
from tests.support.checkpoints import store_model

HUGE = torch.Size((2**60,))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of flk's checkpoints with one of step 0."""
    store_model(str(tmp_path / "run"), {"a": torch.arange(40.0), "b": torch.ones(3, 3)})
    return tmp_path / "run"


def loaded(weights: Weights, size: int = 8) -> torch.Tensor:
    """The tensor a."""
    found = torch.full((size,), -1.0)
    weights.read(chunks_of(("model", "a"), found))
    return found


@pytest.mark.parametrize("path", ["", "step-000000000"], ids=["folder", "checkpoint"])
def test_a_flipped_bit_in_a_checkpoint_of_flk_is_refused(folder: Path, path: str) -> None:
    file = next((folder / "step-000000000").glob("*.distcp"))
    content = file.read_bytes()
    assert torch.equal(loaded(Weights(str(folder / path)), 40), torch.arange(40.0))
    for bit in random.Random(0).sample(range(8 * len(content)), 20):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"distcp has another checksum|holds no whole checkpoint"):
            Weights(str(folder / path))
    assert file.exists()  # who only reads renames nothing


def saved(folder: Path) -> Path:
    """A checkpoint of torch's, of one tensor."""
    with warnings.catch_warnings():  # it is one process, as torch says
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.arange(8.0)}, checkpoint_id=folder)
    return folder


def changed(folder: Path, change: Callable[[dcp.Metadata], object]) -> Path:
    """A checkpoint of torch's whose metadata somebody has changed."""
    metadata = saved(folder) / ".metadata"
    content = pickle.loads(metadata.read_bytes())
    change(content)
    metadata.write_bytes(pickle.dumps(content))
    return folder


def elsewhere(metadata: dcp.Metadata) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = "../victim/__0_0.distcp"


def with_hole(metadata: dcp.Metadata) -> None:
    entry = metadata.state_dict_metadata["a"]
    half = dcp.metadata.ChunkStorageMetadata(torch.Size((0,)), torch.Size((4,)))
    entry.chunks = [half, half]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (elsewhere, "names a file outside of it, '../victim/__0_0.distcp'"),
        (with_hole, "does not hold all of the tensor 'a'"),
        (lambda metadata: metadata.storage_data.clear(), "cannot read"),
        (lambda metadata: setattr(metadata.state_dict_metadata["a"], "chunks", None), "does not hold all of"),
        (lambda metadata: setattr(metadata.state_dict_metadata["a"], "chunks", [3]), "cannot read"),
        (lambda metadata: setattr(metadata.state_dict_metadata["a"], "properties", None), "does not tell dtype"),
        (lambda metadata: setattr(metadata.state_dict_metadata["a"], "size", "eight"), "does not tell dtype"),
    ],
)
def test_a_strangers_checkpoint_is_refused(
    tmp_path: Path, change: Callable[[dcp.Metadata], object], reason: str
) -> None:
    saved(tmp_path / "victim")
    with pytest.raises(CheckpointError, match=reason):
        loaded(Weights(str(changed(tmp_path / "given", change))))


def test_a_tensor_that_no_memory_has_is_refused(tmp_path: Path) -> None:
    weights = Weights(str(changed(tmp_path, lambda found: setattr(found.state_dict_metadata["a"], "size", HUGE))))
    with pytest.raises(CheckpointError, match="has no tensor 'a' that can be read"):
        weights._checkpoint.tensors(["a"])


def write_safetensors(path: Path, header: object) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 20]},
        {"dtype": "F32", "shape": [40], "data_offsets": [0, 160]},
        {"dtype": "F32", "shape": "four", "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 2**64]},
        {"dtype": "F32", "shape": [4]},
        [],
        None,
    ],
)
def test_a_safetensors_file_whose_header_does_not_fit_is_refused(tmp_path: Path, entry: object) -> None:
    write_safetensors(tmp_path / "w.safetensors", {"a": entry})
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        safetensors.read(tmp_path / "w.safetensors")


@pytest.mark.parametrize("name", ["../victim.safetensors", "{folder}/victim.safetensors"])
def test_an_index_that_names_a_file_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    write_safetensors(tmp_path / "victim.safetensors", {"a": entry})
    (tmp_path / "given").mkdir()
    index = {"weight_map": {"a": name.format(folder=tmp_path)}}
    (tmp_path / "given" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="names a file outside of it"):
        Weights(str(tmp_path / "given"))


def test_a_link_in_a_folder_is_followed_as_hugging_faces_cache_needs(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    (tmp_path / "blobs").mkdir()
    write_safetensors(tmp_path / "blobs" / "1a", {"a": entry})
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/1a")
    assert torch.equal(loaded(Weights(str(tmp_path / "snapshot")), 4), torch.zeros(4))


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "folder/.metadata", "folder/model.safetensors.index.json"])
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / name)
    given = tmp_path / ("folder" if name.startswith("folder") else name)
    with pytest.raises(CheckpointError, match="is not a"):
        Weights(str(given))
