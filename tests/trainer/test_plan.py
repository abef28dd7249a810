"""The memory plan against the counted live bytes of real steps, and what it chooses."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import tiny
import torch
from graft_lora.trainer import adapters, memory, plan
from graft_lora.trainer.adapters import LoraSettings
from graft_lora.trainer.base_model import load_base
from graft_lora.trainer.errors import SettingsError
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.live_bytes import LiveBytes, tensors_of
from graft_lora.trainer.loop import TrainSession
from graft_lora.trainer.plan import GIB, Budget, Workload, choose, predict, usable
from graft_lora.trainer.samples import Sample
from graft_lora.trainer.sampling import sample
from graft_lora.trainer.settings import AUTO, TrainSettings
from graft_lora.trainer.text_trunk import TextTrunk
from torch import nn


@pytest.fixture(autouse=True)
def _slim_however_small(monkeypatch):
    """Blocks of tiny models are slim too, as those of published size are."""
    monkeypatch.setattr(memory, "SMALL", 0)


BLOCKS = 4
# Large enough that activations weigh as much as weights, as they do at full size.
LATENTS = {"krea2": (16, 24, 40), "ideogram4": (128, 12, 20)}
TOKENS = 20


def config_of(name, blocks=BLOCKS):
    return FAMILIES[name].with_blocks(tiny.CONFIGS[name], blocks)


def base_file(name, folder, blocks=BLOCKS):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = FAMILIES[name].build(config_of(name, blocks))
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=1 / parameter.shape[-1] ** 0.5)
    return tiny.write(model, folder / f"{name}.safetensors")


def workload(name, **changes):
    values = {"precision": "bf16", "checkpointing": True, "blocks_on_cpu": 0, "lora": LoraSettings(rank=4, alpha=4)}
    config = config_of(name, changes.pop("blocks", BLOCKS))
    return Workload(FAMILIES[name], config, LATENTS[name], TOKENS, **(values | changes))


def counted(name, folder, work):
    """Peak of live bytes of a real run: two steps, with a preview before the second; less what lies on the CPU."""
    base = load_base(base_file(name, folder), work.precision, work.compute_dtype, blocks_on_cpu=work.blocks_on_cpu)
    generator = torch.Generator().manual_seed(0)
    conditioning = torch.randn(TOKENS, tiny.WIDTHS[name], generator=generator)
    dataset = [
        Sample(str(index), "", torch.randn(work.latent_shape, generator=generator), conditioning)
        for index in range(work.batch_size)
    ]
    targets = adapters.resolve_targets(base.family, adapters.linears(base.model), work.lora)
    trunk = TextTrunk(base, targets, "base")
    dataset = trunk.samples(dataset)
    train = TrainSettings(
        steps=2, batch_size=work.batch_size, optimizer=work.optimizer, checkpointing=work.checkpointing,
        ema=0.9 if work.ema else 0.0,
    )  # fmt: skip
    parked = {id(t) for child in base.family.text_trunk for t in tensors_of(base.model.get_submodule(child))}
    with TrainSession(base, dataset, work.lora, train, "a") as session:
        session.step()
        on_cpu = base.on_cpu
        placed = set() if on_cpu is None else {id(p.layer.get_buffer(p.name)) for b in on_cpu.host for p in b.places}
        here = [
            tensor
            for tensor in tensors_of(base.model)
            if id(tensor) not in placed and not (trunk.frozen and id(tensor) in parked)
        ]
        here += [slot.flat for slot in on_cpu.slots] if on_cpu else []
        moments = [t for state in session.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        average = session.average.values if session.average else []
        with LiveBytes([*here, *moments, *average], [b.flat for b in on_cpu.host] if on_cpu else []) as live:
            if work.preview:
                one = dataset[0].conditioning[None]
                with session.result(), adapters.active(base.model, "a"):
                    text = one if trunk.frozen else base.model.encode_text(one)
                    sample(base.model, base.family, text, text, work.latent_shape, torch.Generator(), 1, 2.0)
            session.step()
        return live.peak


CASES = {
    "checkpointing": {},
    "without": {"checkpointing": False},
    "in one block": {"checkpointing": 1},
    "in two blocks of four": {"checkpointing": 2, "precision": "int8", "blocks_on_cpu": 2},
    "nf4": {"precision": "nf4"},
    "fp32": {"precision": "fp32", "compute_dtype": "fp32"},
    "batch of 2": {"batch_size": 2, "preview": False},
    "blocks on the CPU": {"precision": "int8", "blocks_on_cpu": 3},
    "all on the CPU": {"blocks_on_cpu": BLOCKS, "checkpointing": False},
    "average": {"ema": True},
    "trained trunk": {"lora": LoraSettings(rank=4, alpha=4, targets="all")},
    "some blocks": {"lora": LoraSettings(rank=4, alpha=4, blocks="2-3")},
    "dora": {"lora": LoraSettings("dora", rank=4, alpha=4), "precision": "int8"},
    "blocks by number": {"lora": LoraSettings(rank=4, alpha=4, targets=r"(blocks|layers)\.[12]\.(attn|attention)\..*")},
    "lokr": {"lora": LoraSettings("lokr", rank=4, alpha=4), "checkpointing": False},
}


@pytest.mark.parametrize("case", CASES)
def test_the_prediction_is_within_10_percent_of_a_real_run(family_name, tmp_path, case):
    work = workload(family_name, **CASES[case])
    found, wanted = predict(work).device, counted(family_name, tmp_path, work)
    assert abs(found - wanted) < 0.1 * wanted, f"predicted {found / 2**20:.2f} MiB, counted {wanted / 2**20:.2f} MiB"


@pytest.mark.parametrize("checkpointing", [False, True, 3])
def test_two_counts_with_few_blocks_give_that_of_all(family_name, checkpointing):
    work = workload(family_name, blocks=6, checkpointing=checkpointing, precision="int8")
    assert predict(work).device == int(plan._count(work).peak)


def test_one_recomputing_block_is_not_taken_for_true(family_name):
    """True equals 1, in a cache too."""
    work = [workload(family_name, blocks=6, checkpointing=how_many, precision="int8") for how_many in (True, 1, True)]
    peaks = [predict(one).device for one in work]
    assert peaks[1] > peaks[0] == peaks[2]


def test_each_block_that_recomputes_takes_less():
    peaks = [predict(workload("krea2", blocks=6, checkpointing=number)).device for number in range(7)]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks[:6])) == 6


@pytest.mark.parametrize("number", ["4", "[04]"])
def test_targets_that_name_blocks_by_number_are_counted_with_all_the_blocks(family_name, number, monkeypatch):
    """With fewer blocks the targets would match nothing, or other shares of them than they do."""
    targets = rf"(blocks|layers)\.{number}\.(attn|attention)\..*"
    work = workload(family_name, blocks=5, lora=LoraSettings(rank=4, alpha=4, targets=targets))
    # The whole is counted once, here or where it is predicted; what is counted with fewer blocks is another workload.
    monkeypatch.setattr(plan, "_count", functools.cache(plan._count))
    counted_whole = plan._count(work)
    assert predict(work).device == int(counted_whole.peak)
    assert predict(work).adapter == int(counted_whole.adapter)


def test_blocks_on_the_cpu_take_pinned_memory_rounded_up_by_the_allocator(family_name, tmp_path):
    work = workload(family_name, precision="int8", blocks_on_cpu=3)
    base = load_base(base_file(family_name, tmp_path), "int8", "bf16", blocks_on_cpu=3)
    pinned = predict(work).host - predict(dataclasses.replace(work, blocks_on_cpu=0)).host
    wanted = 3 * 2 ** (base.on_cpu.host_bytes // 3 - 1).bit_length()
    assert pinned == wanted


def test_a_second_transformer_for_previews_has_all_its_blocks_on_the_cpu():
    work = workload("ideogram4", precision="int8", blocks_on_cpu=3)
    paired = predict(dataclasses.replace(work, unconditional=True))
    alone = predict(work)
    whole = predict(dataclasses.replace(work, blocks_on_cpu=0)).weights
    block = (whole - alone.weights) / (3 - 2)
    assert paired.device - alone.device == pytest.approx(whole - (BLOCKS - 2) * block, rel=1e-6)
    assert paired.host - alone.host == BLOCKS * 2 ** (int(block) - 1).bit_length()


# --- choosing, at full size ------------------------------------------------------------------------------------------

# The counts of one process serve all of these.
full = pytest.mark.xdist_group("full size")

# GB of the card → side of the pictures, and GiB that a run may take of it.
PROMISES = {8: (512, 7.0), 12: (1024, 10.3), 16: (1024, 14.5), 24: (1024, 22.0)}


def full_size(name, side, **changes):
    family = FAMILIES[name]
    cells = side // family.latent_downscale
    return Workload(family, family.published, (family.latent_channels, cells, cells), **changes)


@full
@pytest.mark.parametrize("card", PROMISES)
def test_auto_fits_the_promised_cards_with_rank_32_and_previews(family_name, card):
    side, most = PROMISES[card]
    chosen = choose(full_size(family_name, side), Budget(usable(card * GIB, card * GIB), 24 * GIB))
    prediction = predict(chosen)
    assert AUTO not in (chosen.precision, chosen.checkpointing, chosen.blocks_on_cpu)
    assert chosen.preview
    assert chosen.lora.rank == 32
    assert prediction.device <= most * GIB
    assert prediction.host <= 24 * GIB


@full
def test_figures_of_full_size_weights_and_adapters():
    """From the published sizes: 23.9 GiB of bf16 weights, 107e6 and 85.2e6 adapter parameters at 12 bytes with Adam."""
    krea2 = predict(full_size("krea2", 1024, precision="bf16", checkpointing=True, blocks_on_cpu=0))
    trunk = 0.75 * GIB  # of the 23.9 GiB, the text trunk waits on the CPU
    assert krea2.weights == pytest.approx(23.9 * GIB - trunk, rel=0.01)
    assert krea2.adapter == pytest.approx(1.20 * GIB, rel=0.01)
    ideogram4 = predict(full_size("ideogram4", 1024, precision="int8", checkpointing=True, blocks_on_cpu=0))
    assert ideogram4.adapter == pytest.approx(12 * 85.2e6, rel=0.01)  # on the fused qkv


def test_a_fast_card_needs_no_checkpointing_and_no_cpu():
    work = workload("krea2", precision=AUTO, checkpointing=AUTO, blocks_on_cpu=AUTO)
    chosen = choose(work, Budget(80 * GIB, 80 * GIB))
    assert (chosen.precision, chosen.checkpointing, chosen.blocks_on_cpu) == ("bf16", False, 0)


def test_auto_recomputes_the_fewest_blocks_that_fit(family_name):
    for on_cpu in (2, 0):
        work = workload(family_name, blocks=6, precision="int8", checkpointing=AUTO, blocks_on_cpu=on_cpu)
        numbers = (False, 1, 2, 3, 4, 5)
        takes = {number: predict(dataclasses.replace(work, checkpointing=number)).device for number in numbers}
        for number, bytes in takes.items():
            chosen = choose(work, Budget(bytes, 80 * GIB)).checkpointing
            assert chosen == number
            assert (chosen is False) == (number == 0)
    least = predict(dataclasses.replace(work, checkpointing=True)).device
    if family_name == "ideogram4":  # where a number lets a block keep an output, all of them take less still
        assert least < takes[5]
        assert choose(work, Budget(least, 80 * GIB)).checkpointing is True


@full
def test_what_the_settings_say_is_kept_and_the_rest_is_chosen():
    work = full_size("krea2", 1024, precision="int8")
    chosen = choose(work, Budget(usable(12 * GIB, 12 * GIB), 24 * GIB))
    assert chosen.precision == "int8"
    assert chosen.blocks_on_cpu > 14
    with pytest.raises(SettingsError, match=r"Krea 2 at 1024² with rank 32 takes .* in int8 with 2 blocks on the CPU"):
        choose(dataclasses.replace(work, blocks_on_cpu=2), Budget(usable(12 * GIB, 12 * GIB), 24 * GIB))


def test_precisions_that_cannot_be_used_are_passed_over():
    work = workload("krea2", precision=AUTO, checkpointing=AUTO, blocks_on_cpu=AUTO)
    chosen = choose(work, Budget(80 * GIB, 80 * GIB), {"bf16": "no", "int8": None, "nf4": None})
    assert chosen.precision == "int8"


@full
def test_little_main_memory_means_fewer_blocks_there():
    roomy = choose(full_size("ideogram4", 1024), Budget(usable(12 * GIB, 12 * GIB), 24 * GIB))
    tight = choose(full_size("ideogram4", 1024), Budget(usable(12 * GIB, 12 * GIB), 6 * GIB))
    assert (roomy.precision, tight.precision) == ("int8", "nf4")
    assert predict(tight).host <= 6 * GIB


@full
def test_a_card_that_cannot_says_what_it_can():
    with pytest.raises(SettingsError) as caught:
        choose(full_size("krea2", 1024), Budget(int(4.6 * GIB), 32 * GIB))
    said = str(caught.value)
    assert said.startswith("Krea 2 at 1024² with rank 32 takes ")
    assert "in nf4 with 28 blocks on the CPU; 4.6 GiB and 32.0 GiB can be used: " in said
    side = int(said.rpartition(": ")[2].split("²")[0])
    least = {"precision": "nf4", "checkpointing": True, "blocks_on_cpu": 28}
    assert predict(full_size("krea2", side, **least)).device <= 4.6 * GIB


def test_usable_memory_of_common_cards():
    assert [round(usable(card * GIB, card * GIB) / GIB, 1) for card in PROMISES] == [6.7, 10.3, 13.9, 21.1]
    assert usable(12 * GIB, 6 * GIB) == 5.75 * GIB  # others hold half of it
