"""Epochs, repeats, flips, caption dropout, and batches in which each sample keeps its own caption."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from graft_lora.trainer.batches import BatchStream, Visit, collate
from graft_lora.trainer.samples import Sample


def samples(shapes, **fields):
    return [
        Sample(
            str(index),
            f"caption {index}",
            torch.full(shape, float(index)),
            torch.full((1 + index % 3, 4), float(index)),
            **fields,
        )
        for index, shape in enumerate(shapes)
    ]


MIXED = [(16, 8, 8)] * 7 + [(16, 4, 16)] * 4


def batches_of(stream, count):
    return [next(stream) for _ in range(count)]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
def test_an_epoch_visits_every_sample_once_each_with_its_own_caption(batch_size):
    """TrainLoraNode runs every image with every caption."""
    data = samples(MIXED)
    stream = BatchStream(data, batch_size, torch.Generator().manual_seed(0))
    per_epoch = -(-7 // batch_size) + -(-4 // batch_size)
    orders = []
    for epoch in range(3):
        groups = batches_of(stream, per_epoch)
        assert stream.epoch == epoch + 1
        names = [data[visit.sample].name for group in groups for visit in group]
        assert Counter(names) == Counter(s.name for s in data)
        orders.append(names)
        for group in groups:
            batch = collate(data, group, None)
            for row, name in enumerate(batch.names):
                length = 1 + int(name) % 3
                assert (batch.latents[row] == float(name)).all()
                assert (batch.conditioning[row, :length] == float(name)).all()
                assert (batch.conditioning[row, length:] == 0).all()
                if batch.mask is not None:
                    assert batch.mask[row].tolist() == [column < length for column in range(batch.mask.shape[1])]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_repeats_are_visits_of_one_epoch(batch_size):
    data = samples([(16, 8, 8)] * 3)
    data[1] = Sample(**{**data[1].__dict__, "repeats": 5})
    stream = BatchStream(data, batch_size, torch.Generator().manual_seed(0))
    groups = batches_of(stream, -(-7 // batch_size))
    assert Counter(visit.sample for group in groups for visit in group) == {0: 1, 1: 5, 2: 1}
    assert stream.epoch == 1


def test_flips_are_chosen_by_chance_and_only_where_there_is_a_mirrored_picture():
    plain, mirrored = samples([(16, 8, 8)]), samples([(16, 8, 8)], flipped=torch.full((16, 8, 8), -1.0))
    visits = [batch[0] for batch in batches_of(BatchStream(mirrored, 1, torch.Generator().manual_seed(0)), 400)]
    assert 150 < sum(visit.flipped for visit in visits) < 250
    assert not any(b[0].flipped for b in batches_of(BatchStream(plain, 1, torch.Generator().manual_seed(0)), 50))
    assert (collate(mirrored, [Visit(0, flipped=True, captioned=True)], None).latents == -1).all()


def test_a_mask_is_mirrored_with_its_picture_and_others_count_whole():
    weights = torch.zeros(8, 8)
    weights[:, :2] = 1
    data = samples([(16, 8, 8)], flipped=torch.zeros(16, 8, 8), weights=weights) + samples([(16, 8, 8)])
    batch = collate(data, [Visit(0, True, True), Visit(0, False, True), Visit(1, False, True)], None)
    assert torch.equal(batch.weights[0, 0], weights.flip(-1))
    assert torch.equal(batch.weights[1, 0], weights)
    assert (batch.weights[2] == 1).all()
    assert collate(data, [Visit(1, False, True)], None).weights is None


def test_caption_dropout_shows_the_empty_prompt_or_no_text():
    data = samples([(16, 8, 8)] * 3)
    stream = BatchStream(data, 1, torch.Generator().manual_seed(0), caption_dropout=0.25)
    dropped = sum(not batch[0].captioned for batch in batches_of(stream, 600))
    assert 100 < dropped < 200
    visits = [Visit(2, False, False), Visit(1, False, True)]
    empty = torch.full((1, 4), 9.0)
    batch = collate(data, visits, empty)
    assert (batch.conditioning[0, 0] == 9).all()
    assert batch.mask.tolist() == [[True, False], [True, True]]
    masked = collate(data, visits, None)
    assert masked.mask.tolist() == [[False, False], [True, True]]


def test_equal_lengths_need_no_mask():
    assert collate(samples([(16, 8, 8)]), [Visit(0, False, True)], None).mask is None


@pytest.mark.parametrize("after", [0, 1, 5, 9])
def test_a_saved_stream_continues_where_it_stood(after):
    def new(seed):
        generator = torch.Generator().manual_seed(seed)
        data = samples(MIXED, flipped=torch.zeros(1))
        return generator, BatchStream(data, 2, generator, caption_dropout=0.5)

    generator, stream = new(0)
    batches_of(stream, after)
    state, kept = stream.state_dict(), generator.get_state()
    wanted = batches_of(stream, 20)
    other_generator, other = new(5)
    batches_of(other, 3)
    other.load_state_dict(state)
    other_generator.set_state(kept)
    assert batches_of(other, 20) == wanted
