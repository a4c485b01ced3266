"""Flow-Factory's adapter on stand-ins for both layouts of its trainers; tests/peers has the real one."""

import sys
import types
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recast import RecastError, WeightMatrix
from recast.core.advantage import advantages
from recast.integrations import flow_factory

W = WeightMatrix(("clip", "ocr"), [0, 0.3, 0.6, 1], [[0.2, 0.1, 0.1], [0.1, 0.2, 0.3]], [0.4, 0.6])
DOWN = torch.tensor(1000 * W.sigmas[:0:-1].copy(), dtype=torch.float32)
ORDER = (1, 2, 0)


class Sample:
    """A sample; batches are stacked from them."""

    def __init__(self, number: int) -> None:
        self.number, self.extra_kwargs = number, dict[str, Any]()

    @classmethod
    def stack(cls, samples: list["Sample"]) -> dict[str, Any]:
        rows = torch.stack([sample.extra_kwargs["advantage"] for sample in samples])
        return {"advantage": rows, "timesteps": DOWN.expand(len(samples), 3), "n": [s.number for s in samples]}


class Processor:
    """Collects the scores of three prompts' images; `ranks` processes have four images each."""

    def __init__(self, scores: np.ndarray, same_rank: bool = False, ranks: int = 1) -> None:
        self.scores, self.global_std, self.group_on_same_rank = scores, True, same_rank
        self.ranks, self.called = ranks, ""
        self.accelerator = SimpleNamespace(num_processes=ranks, process_index=1 if ranks > 1 else 0, device="cpu")

    def collect_group_rewards(self, samples: Any, rewards: Any) -> Any:
        numbers = [sample.number for sample in samples]
        found = {"ocr": self.scores[numbers, 1], "clip": self.scores[numbers, 0], "other": self.scores[numbers, 0]}
        return found, np.array(numbers) // 4

    def _to_local(self, values: Any) -> Any:
        return torch.as_tensor(values)

    def compute_advantages(self, samples: Any, rewards: Any, store_to_samples: bool, aggregation_func: Any) -> Any:
        return aggregation_func(self, samples, rewards, store_to_samples)


class Trainer:
    """What both trainers do: aggregate, stack, call the model at a timestep, and only then read the advantage."""

    def __init__(self, processor: Processor) -> None:
        self.advantage_processor, self.read = processor, list[Any]()
        scheduler = SimpleNamespace(timesteps=DOWN)
        self.adapter = SimpleNamespace(forward=lambda *, t, latents=None: None, scheduler=scheduler)

    def start(self) -> None:
        samples = [Sample(k) for k in range(12)]
        self.advantage_processor.compute_advantages(samples, {}, store_to_samples=True, aggregation_func="gdpo")
        self.adapter.forward(t=torch.tensor(1000.0))  # sampling
        self.optimize(samples)

    def optimize(self, samples: list[Sample]) -> None:
        for k in range(0, 12, 3):  # as many samples as steps: a table instead of a column would not fail
            batch = sys.modules[type(self).__module__].BaseSample.stack(samples[k : k + 3])  # type: ignore[attr-defined]
            assert {**batch}["n"] == batch["n"]
            for step in ORDER:
                self.adapter.forward(t=batch["timesteps"][:, step])
                self.read.append((batch["n"], step, batch["advantage"]))


def newer(batch: Any, step: int) -> Any:
    """The state of a step in the layout with trainers/rl/."""
    return SimpleNamespace(sigma={"latent": batch["timesteps"][:, step] / 1000})


class NewerNFT(Trainer):
    """DiffusionNFT in trainers/rl/."""

    def optimize(self, samples: list[Sample]) -> None:
        module: Any = sys.modules[type(self).__module__]
        batch = Sample.stack(samples)
        for step in (*ORDER, *ORDER):  # the old policy's pass over all steps comes first
            module.forward_velocity_state(self, batch, None, newer(batch, step), source="policy")
            self.read.append((batch["n"], step, batch["advantage"]))


class NewerGRPO(Trainer):
    """GRPO in trainers/rl/."""

    def optimize(self, samples: list[Sample]) -> None:
        batch = Sample.stack(samples)
        for step in ORDER:
            self.adapter.get_replay_step(batch, step)
            self.read.append((batch["n"], step, batch["advantage"]))


def trainer(name: str, base: type[Trainer], processor: Processor, **module: Any) -> Any:
    """A trainer of that name in a module of its own, which holds `module`."""
    home: Any = types.ModuleType(f"stand_in_{name}")
    vars(home).update(module)
    sys.modules[home.__name__] = home
    made = type(name, (base,), {"__module__": home.__name__})(processor)
    if base is NewerGRPO:
        made.adapter.get_replay_step = lambda batch, step_index: newer(batch, step_index)
    return made


@pytest.fixture(name="scores")
def some() -> np.ndarray:
    values = np.random.default_rng(0).normal(size=(12, 2))
    values[8:, 1] = np.nan
    return values


@pytest.mark.parametrize(
    ("name", "base", "module"),
    [
        ("DiffusionNFTTrainer", Trainer, {"BaseSample": Sample}),
        ("GRPOTrainer", Trainer, {"BaseSample": Sample}),
        ("GRPOGuardTrainer", Trainer, {"BaseSample": Sample}),
        ("DiffusionNFTTrainer", NewerNFT, {"forward_velocity_state": lambda *_, **__: None}),
        ("GRPOTrainer", NewerGRPO, {}),
    ],
)
def test_the_advantage_is_that_of_the_timestep(name: str, base: Any, module: Any, scores: np.ndarray) -> None:
    peer = trainer(name, base, Processor(scores), **module)
    flow_factory.attach(peer, W)
    peer.start()
    table = torch.as_tensor(advantages(scores, np.arange(12) // 4, W, "reward", "batch"))
    assert len(peer.read) >= 3
    for numbers, step, found in peer.read:
        assert torch.equal(found, table[numbers, 2 - step].float())


def test_processes_that_keep_their_prompts_share_statistics(scores: np.ndarray) -> None:
    """group_contiguous: a process sees its own samples, and the others' come by gather."""
    processor = Processor(scores, same_rank=True, ranks=3)

    def gather(own: torch.Tensor) -> torch.Tensor:
        assert own[:, -1].tolist() == [5.0] * 4, "a prompt's number, moved past those of other processes"
        every = np.column_stack([scores[:, [0, 1]], np.repeat([0.0, 5.0, 10.0], 4)])
        assert own.tolist() == every[4:8].tolist()
        return torch.as_tensor(every)

    processor.accelerator.gather = gather
    peer = trainer("GRPOTrainer", Trainer, processor, BaseSample=Sample)
    flow_factory.attach(peer, W)
    mine = [Sample(k) for k in range(4, 8)]
    found = processor.compute_advantages(mine, {}, store_to_samples=True)  # type: ignore[call-arg]
    expected = advantages(scores, np.arange(12) // 4, W, "reward", "batch")[4:8]
    np.testing.assert_array_equal(found.numpy(), expected)


def test_what_cannot_be_right_is_refused(scores: np.ndarray) -> None:
    other = WeightMatrix(W.rewards, [0, 0.2, 0.5, 1], W.matrix, W.budget)
    peer = trainer("GRPOTrainer", Trainer, Processor(scores), BaseSample=Sample)
    flow_factory.attach(peer, other)
    with pytest.raises(RecastError, match="2 of 3 noise levels of the trainer are not steps of W"):
        peer.start()
    with pytest.raises(RecastError, match="AWMTrainer cannot take W: choose trainer_type nft, grpo or grpo-guard"):
        flow_factory.attach(trainer("AWMTrainer", Trainer, Processor(scores), BaseSample=Sample), W)
    peer = trainer("DiffusionNFTTrainer", Trainer, Processor(scores), BaseSample=Sample)
    peer.time_sampling_strategy = "logit_normal"
    with pytest.raises(RecastError, match="time_sampling_strategy logit_normal draws noise levels between W's steps"):
        flow_factory.attach(peer, W)
    assert flow_factory.attach(peer, W, strict=False).strict is False
    missing = WeightMatrix(("clip", "hps"), W.sigmas, W.matrix, W.budget)
    peer = trainer("GRPOTrainer", Trainer, Processor(scores), BaseSample=Sample)
    flow_factory.attach(peer, missing)
    with pytest.raises(RecastError, match="no scores for hps, which W needs; the trainer has ocr, clip, other"):
        peer.start()


def test_the_command_attaches_before_it_trains(
    scores: np.ndarray, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    peer = trainer("DiffusionNFTTrainer", Trainer, Processor(scores), BaseSample=Sample)
    module: Any = types.ModuleType("flow_factory.train")
    module.load_trainer = lambda config: peer
    module.main = lambda: module.load_trainer("config").start()
    monkeypatch.setitem(sys.modules, "flow_factory", types.ModuleType("flow_factory"))
    monkeypatch.setitem(sys.modules, "flow_factory.train", module)
    monkeypatch.setenv("RECAST_WEIGHTS", str(W.save(tmp_path / "weights.json")))
    flow_factory.main()
    assert peer.read[0][2].shape == (3,)
