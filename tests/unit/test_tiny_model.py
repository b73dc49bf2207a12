"""The lab's model: its files are complete, well-formed and always the same."""

import json
from pathlib import Path

import pytest

from tests.lab import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("cache"))


def header(file: Path) -> tuple[dict[str, dict[str, list[int]]], int]:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    tensors = json.loads(data[8 : 8 + length])
    del tensors["__metadata__"]
    return tensors, len(data) - 8 - length


def test_the_index_names_every_tensor_of_every_shard(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) == 4
    assert index["weight_map"] == {
        name: shard.name for shard in shards for name in header(shard)[0]
    }
    assert index["metadata"]["total_size"] == sum(header(shard)[1] for shard in shards)


def test_tensors_fill_their_shard(folder: Path) -> None:
    for shard in folder.glob("*.safetensors"):
        tensors, size = header(shard)
        spans = sorted(tensor["data_offsets"] for tensor in tensors.values())
        assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
        assert spans[-1][1] == size


def test_a_second_build_is_the_same(folder: Path, tmp_path: Path) -> None:
    again = tiny_model.build(tmp_path)
    assert again.name == folder.name
    assert {file.name: file.read_bytes() for file in again.iterdir()} == {
        file.name: file.read_bytes() for file in folder.iterdir()
    }


def test_a_folder_that_exists_is_used(folder: Path) -> None:
    before = folder.stat().st_mtime_ns
    assert tiny_model.build(folder.parent) == folder
    assert folder.stat().st_mtime_ns == before


def test_ranks_can_share_the_heads(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["num_attention_heads"] % 4 == config["num_key_value_heads"] % 4 == 0


def test_every_byte_and_word_is_a_token() -> None:
    vocabulary = tiny_model.vocabulary()
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    assert set(tiny_model.byte_alphabet()) < set(vocabulary)
    assert len(vocabulary) <= tiny_model.VOCABULARY
