"""Plain reads and writes of safetensors files, against safetensors itself."""

from __future__ import annotations

import pytest
import torch
from graft_lora.trainer.errors import TruncatedFileError
from graft_lora.trainer.tensor_files import DTYPES, Arena, TensorFile, write_tensors
from safetensors.torch import load_file, save_file


def tensors():
    """One of each dtype, of awkward sizes, by the bits: not every pattern is a number."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for number, dtype in enumerate(DTYPES.values()):
        bits = torch.randint(0, 2, (3, 5 + number, dtype.itemsize), dtype=torch.uint8, generator=generator)
        made[f"t{number}"] = bits.view(dtype).squeeze(-1)
    return {**made, "scalar": torch.tensor(1.5), "none": torch.empty(0, 4), "byte": torch.tensor([7], dtype=torch.int8)}


def same(found, wanted):
    return (found.dtype, found.shape) == (wanted.dtype, wanted.shape) and torch.equal(
        found.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("reuse", [False, True])
def test_reads_what_safetensors_wrote(tmp_path, reuse):
    wanted = tensors()
    save_file(wanted, tmp_path / "a.safetensors", {"key": "value"})
    arena = Arena() if reuse else None
    with TensorFile(tmp_path / "a.safetensors", arena) as file:
        assert file.metadata == {"key": "value"}
        assert all(same(file.get_tensor(key), value) for key, value in wanted.items())
        # Without a reset all stay valid beside one another.
        found = {key: file.get_tensor(key) for key in wanted}
    assert all(same(found[key], value) for key, value in wanted.items())


def test_safetensors_reads_what_was_written(tmp_path):
    wanted = tensors()
    layout = {key: (value.dtype, tuple(value.shape)) for key, value in wanted.items()}
    write_tensors(tmp_path / "a.safetensors", layout, wanted.__getitem__, {"key": "value"})
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == wanted.keys()
    assert all(same(found[key], value) for key, value in wanted.items())


def test_a_tensor_that_is_not_what_the_layout_says_is_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"a is torch.float32 \(2,\), the layout says \(torch.float32, \(3,\)\)"):
        write_tensors(tmp_path / "a.safetensors", {"a": (torch.float32, (3,))}, lambda key: torch.zeros(2))


def test_reused_memory_is_the_same_memory_and_grows():
    arena = Arena()
    first = arena.take(100)
    assert arena.take(100).data_ptr() != first.data_ptr()
    arena.reset()
    large = arena.take(1000)
    arena.reset()
    assert arena.take(10).data_ptr() == large.data_ptr()
    assert arena.take(10).data_ptr() % 64 == large.data_ptr() % 64


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path):
    save_file({"a": torch.zeros(1000)}, tmp_path / "a.safetensors")
    with TensorFile(tmp_path / "a.safetensors") as file:
        with (tmp_path / "a.safetensors").open("rb+") as other:
            other.truncate(2000)
        with pytest.raises(TruncatedFileError, match="ends inside a; was it changed"):
            file.get_tensor("a")
