"""The kept quantised base: the same bits as a fresh one, and never trusted where it should not be."""

from __future__ import annotations

import os
import re
import shutil

import pytest
import tiny
import torch
from graft_lora.trainer import quantized_cache
from graft_lora.trainer.base_model import load_base
from graft_lora.trainer.checkpoints import open_model_file
from graft_lora.trainer.quantized_cache import checksum, source_key
from safetensors.torch import load_file, save_file

QUANTISED = ["fp8", "int8", "nf4", "mxfp8"]


@pytest.fixture
def source(tmp_path):
    return tiny.write(tiny.build("krea2"), tmp_path / "base.safetensors", torch.bfloat16)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kept" / "bases"


def load(source, folder, precision="int8"):
    return load_base(source, precision, "fp32", quantized_cache=folder)


def kept(folder):
    (path,) = folder.iterdir()
    return path


def state(base):
    return {**dict(base.model.named_parameters()), **dict(base.model.named_buffers())}


def assert_same(found, wanted):
    found_state, wanted_state = state(found), state(wanted)
    assert list(found_state) == list(wanted_state)
    for name, value in wanted_state.items():
        other = found_state[name]
        assert (other.dtype, other.shape, other.requires_grad) == (value.dtype, value.shape, False), name
        assert torch.equal(other.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name
    assert {k: m.format for k, m in found.model.named_modules() if hasattr(m, "format")} == {
        k: m.format for k, m in wanted.model.named_modules() if hasattr(m, "format")
    }


def was_read(base):
    return any("was read from" in note for note in base.notes)


def note(base, part):
    (found,) = [note for note in base.notes if part in note]
    assert "\n" not in found
    return found


@pytest.mark.parametrize("precision", QUANTISED)
def test_the_kept_base_has_the_bits_of_a_fresh_one(tmp_path, folder, family_name, precision):
    source = tiny.write(tiny.build(family_name), tmp_path / "base.safetensors", torch.bfloat16)
    fresh = load_base(source, precision, "fp32")
    first = load(source, folder, precision)
    assert str(kept(folder)) in note(first, "is kept for the next time")
    second = load(source, folder, precision)
    assert str(kept(folder)) in note(second, "was read from")
    assert_same(first, fresh)
    assert_same(second, fresh)
    # It is the very file's content that arrived, not the source's.
    assert len(load_file(kept(folder))) == len(state(fresh)) + 1
    arguments = tiny.inputs(family_name)
    assert torch.equal(second.model(**arguments), fresh.model(**arguments))


def test_a_kept_base_is_read_without_a_look_at_the_sources_weights(source, folder, monkeypatch):
    load(source, folder)
    monkeypatch.setattr(quantized_cache.ModelFile, "tensors", lambda *_, **__: pytest.fail("the source was read"))
    assert was_read(load(source, folder))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_not_quantised_is_not_kept_with_a_word(source, folder, precision):
    base = load(source, folder, precision)
    assert note(base, "nothing is kept") == f"nothing is kept in {folder}: {precision} is not quantised"
    assert not folder.exists()


def test_weights_that_nf4_cannot_store_come_back_dense(tmp_path, folder):
    model = tiny.build("krea2")
    model.blocks[1].mlp.up.weight.data.zero_()
    source = tiny.write(model, tmp_path / "base.safetensors")
    first, second = load(source, folder, "nf4"), load(source, folder, "nf4")
    assert was_read(second)
    assert_same(second, first)
    assert second.model.get_submodule("blocks.1.mlp.up").format.name == "bf16"
    assert note(second, "nf4 cannot store") == note(first, "nf4 cannot store")


def test_each_precision_has_a_file_of_its_own(source, folder):
    for precision in QUANTISED:
        assert not was_read(load(source, folder, precision))
    assert len(list(folder.iterdir())) == len(QUANTISED)
    assert all(was_read(load(source, folder, precision)) for precision in QUANTISED)


def test_a_source_that_was_written_again_is_another_source(source, folder):
    load(source, folder)
    status = source.stat()
    tiny.write(tiny.build("krea2", seed=1), source, torch.bfloat16)
    assert source.stat().st_size == status.st_size
    # Even where the time of change was put back, the samples tell.
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    base = load(source, folder)
    assert not was_read(base)
    assert_same(base, load_base(source, "int8", "fp32"))


def test_the_key_tells_times_and_headers_apart_and_not_names(source, tmp_path):
    key = source_key(open_model_file(source))
    moved = source.rename(tmp_path / "moved.safetensors")
    assert source_key(open_model_file(moved)) == key
    status = moved.stat()
    os.utime(moved, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    later = source_key(open_model_file(moved))
    # The same weights under another word in the header, of the same length.
    tensors, keys = load_file(moved), set()
    for word in ("one", "two"):
        save_file(tensors, moved, {"word": word})
        os.utime(moved, ns=(status.st_atime_ns, status.st_mtime_ns))
        keys.add(source_key(open_model_file(moved)))
    assert len({key, later, *keys}) == 4


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def cut_in_the_header(path):
    path.write_bytes(path.read_bytes()[:100])


def emptied(path):
    path.write_bytes(b"")


def one_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def one_bit_of_the_checksums(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def changed_state(change, metadata=None):
    def damage(path):
        with quantized_cache.TensorFile(path) as file:
            kept_metadata = dict(file.metadata)
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, kept_metadata | (metadata or {}))

    return damage


DAMAGES = [
    (cut, "is damaged .* is truncated"),
    (cut_in_the_header, "is damaged .* ends inside its header"),
    (emptied, "is damaged .* is not a safetensors file"),
    (one_bit, r"is damaged \(in "),
    (one_bit_of_the_checksums, r"is damaged \(in "),
    (changed_state(lambda s: s.pop("blocks.0.attn.wq.scale")), "does not hold the tensors"),
    (changed_state(lambda s: s.update(more=torch.zeros(1))), "does not hold the tensors"),
    (changed_state(lambda s: s.update({"first.bias": s["first.bias"].float()})), "does not hold the tensors"),
    (changed_state(lambda s: s.update({"first.bias": s["first.bias"][1:].clone()})), "does not hold the tensors"),
    (changed_state(lambda s: None, {"graft": "quantised base 0"}), "another version .quantised base 0; wanted"),
    (changed_state(lambda s: None, {"made by": "torchao 0.1, torch 2.0"}), "was made by another version .torchao 0.1"),
    (changed_state(lambda s: None, {"misfits": "{"}), "is damaged .its metadata"),
    (changed_state(lambda s: None, {"misfits": '["nonsense"]'}), "does not hold the tensors"),
    (changed_state(lambda s: None, {"misfits": '["blocks.0.mlp.up"]'}), "does not hold the tensors"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_a_kept_base_that_cannot_be_trusted_is_said_and_made_anew(source, folder, damage, said):
    fresh = load(source, folder)
    damage(kept(folder))
    base = load(source, folder)
    assert re.search(said, note(base, "the base was quantised anew"))
    assert_same(base, fresh)
    again = load(source, folder)
    assert was_read(again)
    assert_same(again, fresh)


def test_an_interrupted_write_leaves_nothing(source, folder, monkeypatch):
    def interrupted(path, *_):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(quantized_cache, "write_tensors", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(source, folder)
    assert list(folder.iterdir()) == []
    assert not was_read(load(source, folder))


def test_a_full_disk_costs_the_kept_base_alone(source, folder, monkeypatch):
    def full(path, *_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quantized_cache, "write_tensors", full)
    base = load(source, folder)
    assert "cannot be written to (No space left on device)" in note(base, "is not kept")
    assert list(folder.iterdir()) == []


def test_a_disk_with_too_little_space_is_said_before_writing(source, folder, monkeypatch):
    usage = shutil.disk_usage(source)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    base = load(source, folder)
    assert "0.00 GiB free" in note(base, "is not kept: it takes")
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_said(source, tmp_path):
    """A file in the folder's place stands for it: the superuser may write to any folder."""
    (tmp_path / "file").write_text("")
    base = load(source, tmp_path / "file" / "kept")
    assert "cannot be written to" in note(base, "is not kept")
    assert_same(base, load_base(source, "int8", "fp32"))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may write to any folder")
def test_a_read_only_folder_is_said(source, folder):
    folder.mkdir(parents=True)
    folder.chmod(0o500)
    assert "cannot be written to (Permission denied)" in note(load(source, folder), "is not kept")


def test_the_checksum_finds_what_a_plain_sum_would_not():
    data = torch.arange(3 * 2**20, dtype=torch.int64)
    swapped = torch.cat([data[2**20 : 2**21], data[: 2**20], data[2**21 :]])
    assert checksum(swapped) != checksum(data)
    assert checksum(swapped[: 2**10]) == checksum(swapped[: 2**10].clone())
    for size in (0, 1, 7, 8, 9):  # the bytes behind the last whole word count too
        zeros = torch.zeros(size, dtype=torch.uint8)
        for place in range(size):
            other = zeros.clone()
            other[place] = 1
            assert checksum(other) != checksum(zeros)
