"""The sizes of an epoch: what was asked for, or which numbers would fit; the same for any number of processes."""

import numpy as np
import pytest

from recast.errors import RecastError
from recast.train import groups
from recast.train.decay import old_decay


def test_the_paper_s_batches_on_any_number_of_devices() -> None:
    for processes in (1, 2, 3, 8, 16, 24):
        made = groups.batches(processes, 48, 24, 1152, 25, 24)
        assert (made.groups, made.images, made.batch, made.updates) == (48, 24, 1152, 1)
        assert made.share * processes == 1152
        assert made.accumulation * made.micro == made.share * 25
        assert made.micro <= 24
    made = groups.batches(8, 48, 24, 1152, 25, 24)
    assert made.accumulation == 150  # 6 of the paper's batches of 24, at 25 levels each
    assert made.describe() == (
        "48 prompts with 24 images each per epoch on 8 processes; 1 optimizer step per epoch, of 1152 images at "
        "25 noise levels each; 150 micro-batches of 24 pairs per process and optimizer step"
    )


@pytest.mark.parametrize(
    ("processes", "batch", "words"),
    [
        (1, 100, r"train.batch = 100 does not divide the 192 images of an epoch \(.*\): use 48, 64 or 96$"),
        (5, 96, "train.batch = 96 cannot be divided among 5 processes: use 3, 4 or 6 processes$"),
        (6, 64, "among 6 processes: use 2, 4 or 8 processes, or train.batch = 24, 48 or 96$"),
        (1, 400, r"400 does not divide .*\(train.prompts_per_epoch = 8 times train.images_per_prompt = 24\)"),
        (5, 100, ": change train.prompts_per_epoch or train.images_per_prompt$"),
    ],
)
def test_numbers_that_do_not_fit(processes: int, batch: int, words: str) -> None:
    with pytest.raises(RecastError, match=words):
        groups.batches(processes, 8, 24, batch, 5, 64)


def test_a_micro_batch_is_never_larger_than_asked_for() -> None:
    assert groups.batches(1, 8, 24, 64, 5, 50).micro == 40
    assert groups.batches(1, 8, 24, 64, 5, 10_000).accumulation == 1
    with pytest.raises(RecastError, match="train.images_per_prompt = 1: .*, use at least 2"):
        groups.batches(1, 8, 1, 8, 5, 50)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_the_same_images_of_the_same_steps(processes: int) -> None:
    divided, whole = groups.batches(processes, 8, 24, 64, 5, 64), groups.batches(1, 8, 24, 64, 5, 64)
    order = groups.order(3, 7, divided.total)
    for update in range(divided.updates):
        dealt = np.concatenate([groups.mine(divided, order, update, rank) for rank in range(processes)])
        np.testing.assert_array_equal(dealt, groups.mine(whole, order, update, 0))
    assert sorted(order.tolist()) == list(range(192))
    assert groups.order(3, 8, 192).tolist() != order.tolist()


def test_every_prompt_comes_once_a_pass() -> None:
    seen = [k for epoch in range(5) for k in groups.prompts(1, epoch, 8, 20)]
    assert sorted(seen[:20]) == sorted(seen[20:]) == list(range(20))
    assert seen[:20] != seen[20:]
    assert groups.prompts(2, 0, 8, 20) != groups.prompts(1, 0, 8, 20)
    assert groups.prompts(0, 3, 4, 1) == [0, 0, 0, 0]


def test_seeds_are_an_image_s_own() -> None:
    table = groups.seeds(0, 2, 16, 12)
    assert table.shape == (16, 12)
    assert len(np.unique(table)) == table.size
    assert (table >= 0).all()
    assert not (groups.seeds(0, 3, 16, 12) == table).any()
    assert not (groups.seeds(1, 2, 16, 12) == table).any()


def test_decay_schedules() -> None:
    assert [old_decay(step, 0) for step in (0, 1, 500)] == [0, 0, 0]
    assert [old_decay(step, 1) for step in (0, 1, 120, 500, 9999)] == pytest.approx([0, 0.001, 0.12, 0.5, 0.5])
    found = [old_decay(step, 2) for step in (0, 74, 75, 76, 100, 208, 209, 5000)]
    assert found == pytest.approx([0, 0, 0, 0.0075, 0.1875, 0.9975, 0.999, 0.999])
    with pytest.raises(RecastError, match="unknown train.decay 3"):
        old_decay(1, 3)
