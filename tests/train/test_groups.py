"""The batch plan: what was asked for, or which numbers would fit; the same work for any number of processes."""

import numpy as np
import pytest

from recast.errors import RecastError
from recast.train import groups
from recast.train.decay import old_decay


def test_the_paper_s_plan_on_any_number_of_devices() -> None:
    for processes in (1, 2, 3, 8, 16, 24):
        plan = groups.plan(processes, 48, 24, 1152, 25, 24)
        assert (plan.groups, plan.images, plan.batch, plan.updates) == (48, 24, 1152, 1)
        assert plan.share * processes == 1152
        assert plan.accumulation * plan.micro == plan.share * 25
        assert plan.micro <= 24
    assert groups.plan(8, 48, 24, 1152, 25, 24).accumulation == 150  # 6 of the paper's batches of 24, at 25 levels each
    assert groups.plan(8, 48, 24, 1152, 25, 24).describe() == (
        "48 groups of 24 images an epoch on 8 processes; 1 optimizer step of 1152 images at 25 levels each, "
        "150 calls of 24 pairs a process and step"
    )


@pytest.mark.parametrize(
    ("processes", "batch", "words"),
    [
        (1, 100, r"100 does not divide the 192 images of an epoch \(8 groups of 24\): 48 or 64 or 96 would fit"),
        (5, 96, "5 processes cannot share train.batch = 96 evenly: as processes, 3 or 4 or 6 would fit$"),
        (6, 64, "evenly: as processes, 2 or 4 or 8 would fit; as train.batch, 24 or 48 or 96 would fit"),
        (1, 400, "train.batch = 400 does not divide"),
    ],
)
def test_numbers_that_do_not_fit(processes: int, batch: int, words: str) -> None:
    with pytest.raises(RecastError, match=words):
        groups.plan(processes, 8, 24, batch, 5, 64)


def test_a_call_is_never_larger_than_asked_for() -> None:
    plan = groups.plan(1, 8, 24, 64, 5, 50)
    assert plan.micro == 40
    assert groups.plan(1, 8, 24, 64, 5, 10_000).accumulation == 1
    with pytest.raises(RecastError, match="at least 2 images"):
        groups.plan(1, 8, 1, 8, 5, 50)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_the_same_images_of_the_same_steps(processes: int) -> None:
    plan = groups.plan(processes, 8, 24, 64, 5, 64)
    order = groups.order(3, 7, plan.total)
    whole = groups.plan(1, 8, 24, 64, 5, 64)
    for update in range(plan.updates):
        dealt = np.concatenate([groups.mine(plan, order, update, rank) for rank in range(processes)])
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
    with pytest.raises(RecastError, match="unknown decay 3"):
        old_decay(1, 3)
