"""What changes the identity of a result and what does not, old names of settings, hashes, and seeds from names."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recast import identity
from recast.config import RENAMED, Recipe
from recast.core import artifact
from recast.core.weights import WeightMatrix
from recast.errors import RecastError, StaleError

SIGMAS = [0.0, 0.5, 1.0]
ROWS = [{"prompt": "a cat", "tag": "one"}, {"prompt": "a dog"}]
W = WeightMatrix(("detail", "ocr"), SIGMAS, [[0.4, 0.1], [0.1, 0.4]], [0.5, 0.5])
BASE: dict[str, Any] = {"rewards": {"detail": None, "ocr": {"threads": 2}}, "prompts": {"count": 4}}
PROPOSED = {
    "renderer": {},
    "policy": {"propose.source": "policy"},
    "openai": {"propose.source": "openai"},
    "gemini": {"propose.source": "gemini"},
    "folder": {"propose.source": "folder", "propose.folder": "images"},
}


def recipe(changes: Mapping[str, Any] | None = None, base: Mapping[str, Any] = BASE) -> Recipe:
    """A recipe with settings changed by their dotted names."""
    content = {section: dict(values) for section, values in base.items()}
    for key, value in (changes or {}).items():
        section, _, name = key.partition(".")
        content.setdefault(section, {})[name] = value
    return Recipe.model_validate(content)


def differ(
    of: Callable[[Recipe], Any], changes: Mapping[str, Any], before: Mapping[str, Any] | None = None, **options: Any
) -> bool:
    before = before or {}
    return bool(of(recipe(before, **options)) != of(recipe({**before, **changes}, **options)))


@pytest.mark.parametrize(
    ("change", "matters"),
    [
        ({"policy.model": "other"}, True),
        ({"policy.dtype": "bfloat16"}, True),
        ({"policy.guidance": 2.0}, True),
        ({"policy.resolution": 512}, True),
        ({"policy.max_sequence_length": 128}, True),
        ({"policy.device": "cpu"}, False),
        ({"policy.cached_prompts": 3}, False),
        ({"policy.offload_text": True}, False),
        ({"policy.vae_batch": 1}, False),
        ({"prompts.count": 9}, False),
    ],
)
def test_the_identity_of_a_policy(change: dict[str, Any], matters: bool) -> None:
    assert differ(identity.policy, change) == matters


def test_an_adapter_counts_by_its_content_and_not_by_its_folder(tmp_path: Path) -> None:
    for name, content in (("a", b"one"), ("b", b"one"), ("c", b"two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pytorch_lora_weights.safetensors").write_bytes(content)
    first, same, other = (identity.policy(recipe({"policy.lora": str(tmp_path / name)})) for name in "abc")
    assert first == same != other
    assert "lora" not in identity.policy(recipe())
    assert identity.adapter_hash(tmp_path / "none") != identity.adapter_hash(tmp_path / "a")


@pytest.mark.parametrize(
    ("source", "change", "matters"),
    [
        ("renderer", {"propose.seed": 1}, True),
        ("renderer", {"propose.size": "512x512"}, False),
        ("renderer", {"policy.model": "other"}, False),
        ("renderer", {"estimate.steps": 7}, False),
        ("renderer", {"propose.smallest": 8}, False),
        ("policy", {"propose.seed": 1}, True),
        ("policy", {"policy.model": "other"}, True),
        ("policy", {"estimate.steps": 7}, True),
        ("policy", {"estimate.spacing": 0.5}, True),
        ("policy", {"estimate.noisings": 9}, False),
        ("openai", {"propose.model": "gpt-image-9"}, True),
        ("openai", {"propose.base_url": "http://localhost/v1"}, True),
        ("openai", {"propose.base_url": "https://api.openai.com/v1"}, False),
        ("openai", {"propose.model": "gpt-image-1.5"}, False),
        ("openai", {"propose.size": "512x512"}, True),
        ("openai", {"propose.quality": "low"}, True),
        ("openai", {"propose.seed": 1}, False),
        ("openai", {"propose.cap": 10}, False),
        ("openai", {"propose.concurrency": 8}, False),
        ("gemini", {"propose.size": "512x512"}, False),
        ("gemini", {"propose.model": "nano"}, True),
        ("folder", {"propose.folder": "other"}, True),
        ("folder", {"propose.seed": 1}, False),
    ],
)
def test_the_identity_of_proposals(source: str, change: dict[str, Any], matters: bool) -> None:
    assert differ(identity.proposals, change, PROPOSED[source]) == matters


def test_sources_of_proposals_differ() -> None:
    found = [identity.proposals(recipe(changes)) for changes in PROPOSED.values()]
    assert all(a != b for k, a in enumerate(found) for b in found[:k])


@pytest.mark.parametrize(
    ("change", "matters"),
    [
        ({"estimate.seed": 1}, True),
        ({"estimate.steps": 7}, True),
        ({"estimate.samples": 7}, True),
        ({"estimate.noisings": 7}, True),
        ({"estimate.rollouts": 7}, True),
        ({"estimate.spacing": 0.5}, True),
        ({"estimate.estimator": "paper"}, True),
        ({"policy.dtype": "bfloat16"}, True),
        ({"propose.seed": 1}, True),
        ({"rewards.ocr": {"threads": 1}}, True),
        ({"rewards.aesthetic": None}, True),
        ({"rewards.detail": {}}, False),
        ({"estimate.alpha": 4.0}, False),
        ({"estimate.aggregate": "pooled"}, False),
        ({"estimate.memory": 1.0}, False),
        ({"estimate.shift": 1.0}, False),  # the policy has its own grid
        ({"prompts.count": 9}, False),
        ({"weigh.tau": 2.0}, False),
        ({"train.epochs": 1}, False),
    ],
)
def test_the_identity_of_rollouts(change: dict[str, Any], matters: bool) -> None:
    assert differ(identity.rollouts, change) == matters


def test_rollouts_know_the_order_of_their_rewards() -> None:
    swapped = {"rewards": {"ocr": {"threads": 2}, "detail": None}, "prompts": {"count": 4}}
    assert identity.rollouts(recipe()) != identity.rollouts(recipe(base=swapped))


@pytest.mark.parametrize(
    ("change", "matters"),
    [
        ({"world.seed": 1}, True),
        ({"world.modes": 3}, True),
        ({"world.dimension": 3}, True),
        ({"estimate.shift": 1.0}, True),
        ({"world.prompts": 3}, False),
        ({"estimate.alpha": 4.0}, False),
    ],
)
def test_the_identity_of_rollouts_in_the_exact_world(change: dict[str, Any], matters: bool) -> None:
    assert differ(identity.rollouts, change, base={"world": {"kind": "mixture"}}) == matters


def trained(made: Recipe) -> dict[str, Any]:
    return identity.training(made, W, ROWS)


@pytest.mark.parametrize(
    ("change", "matters"),
    [
        ({"train.learning_rate": 1.0}, True),
        ({"train.images_per_prompt": 4}, True),
        ({"train.kl_weight": 1.0}, True),
        ({"train.seed": 1}, True),
        ({"train.lora": "adapter"}, True),
        ({"train.reweigh_every": 5}, True),
        ({"policy.model": "other"}, True),
        ({"rewards.ocr": {"threads": 1}}, True),
        ({"rewards.aesthetic": None}, False),  # W does not have it
        ({"train.epochs": 7}, False),
        ({"train.micro_batch": 7}, False),
        ({"train.sample_batch": 7}, False),
        ({"train.checkpointing": True}, False),
        ({"train.save_every": 7}, False),
        ({"train.keep": 7}, False),
        ({"train.trackers": []}, False),
        ({"train.prompts": "other.txt"}, False),  # by content
        ({"estimate.alpha": 4.0}, False),
        ({"weigh.tau": 2.0}, False),
        ({"prompts.count": 9}, False),
    ],
)
def test_the_identity_of_training(change: dict[str, Any], matters: bool) -> None:
    assert differ(trained, change) == matters


@pytest.mark.parametrize(
    ("before", "change"),
    [
        ({"train.schedule": "cosine"}, {"train.epochs": 7}),
        ({"train.reweigh_every": 5}, {"estimate.alpha": 4.0}),
        ({"train.reweigh_every": 5}, {"weigh.tau": 2.0}),
        ({"train.reweigh_every": 5}, {"weigh.columns": [1.0, 2.0]}),
        ({"train.reweigh_every": 5}, {"prompts.count": 9}),
        ({"train.reweigh_every": 5}, {"propose.seed": 1}),
    ],
)
def test_settings_that_decide_training_only_with_others(before: dict[str, Any], change: dict[str, Any]) -> None:
    assert differ(trained, change, before)


def test_training_knows_its_weights_and_its_prompts() -> None:
    other = WeightMatrix(W.rewards, SIGMAS, W.matrix[:, ::-1], [0.5, 0.5])
    assert identity.training(recipe(), other, ROWS) != trained(recipe())
    assert identity.training(recipe(), W, ROWS[:1]) != trained(recipe())


@pytest.mark.parametrize(
    ("change", "matters"),
    [
        ({"evaluate.steps": 7}, True),
        ({"evaluate.solver": "euler"}, True),
        ({"evaluate.seed": 7}, True),
        ({"evaluate.guidance": 1.0}, True),
        ({"policy.model": "other"}, True),
        ({"policy.guidance": 2.0}, False),  # evaluation has its own
        ({"policy.lora": "adapter"}, False),  # the one that is evaluated counts
        ({"evaluate.batch": 7}, False),
        ({"evaluate.count": 7}, False),
        ({"evaluate.held_out": {"census": None}}, False),
        ({"rewards.ocr": None}, False),
        ({"train.seed": 1}, False),
    ],
)
def test_the_identity_of_evaluated_images(change: dict[str, Any], matters: bool) -> None:
    assert differ(lambda made: identity.evaluation(made, None, ROWS), change) == matters


def test_evaluated_images_know_their_adapter_and_prompts(tmp_path: Path) -> None:
    found = identity.evaluation(recipe(), None, ROWS)
    assert identity.evaluation(recipe(), None, ROWS[:1]) != found
    (tmp_path / "pytorch_lora_weights.safetensors").write_bytes(b"one")
    assert identity.evaluation(recipe(), tmp_path, ROWS) != found


def test_the_first_difference_is_named() -> None:
    known = {"train.rank": 32, "train.seed": 0, "weights": "abc"}
    identity.require_same(known, dict(known), "it was trained")
    with pytest.raises(StaleError, match="^it was trained with train.rank = 32, not 8: choose another --out"):
        identity.require_same(known, known | {"train.rank": 8, "train.seed": 1}, "it was trained")
    with pytest.raises(StaleError, match="trained with another W:"):
        identity.require_same(known, known | {"weights": "d"}, "it was trained", {"weights": "W"})
    with pytest.raises(StaleError, match="with train.seed = 0, not None"):
        identity.require_same(known, {key: known[key] for key in ("train.rank", "weights")}, "it was trained")
    # A setting that both have comes before those that only one has.
    with pytest.raises(StaleError, match="with source = 'folder', not 'openai'"):
        identity.require_same({"source": "folder", "folder": "x"}, {"source": "openai", "cap": 3}, "made")
    assert issubclass(StaleError, RecastError)


def test_settings_compare_as_json_holds_them() -> None:
    identity.require_same({"betas": [0.9, 0.999]}, {"betas": (0.9, 0.999)}, "made")
    identity.require_same({"lora": None}, {}, "made")


@pytest.mark.parametrize("old", RENAMED)
def test_settings_recorded_under_old_names_compare_equal(old: str) -> None:
    identity.require_same({old: 3}, {RENAMED[old]: 3}, "made")
    with pytest.raises(StaleError, match=f"made with {RENAMED[old]} = 3, not 4"):
        identity.require_same({old: 3}, {RENAMED[old]: 4}, "made")


def test_a_checkpoint_of_version_0_1_is_of_the_same_training() -> None:
    old = {new: name for name, new in RENAMED.items()}
    wanted = identity.training(recipe({"rewards.hpsv2": {"checkpoint": "a.pt"}}), W, ROWS)
    recorded = {old.get(key, key): artifact.plain(value) for key, value in wanted.items()}
    assert {"train.groups", "train.images", "train.penalty", "train.normalise"} <= set(recorded)
    identity.require_same(recorded, wanted, "it was trained")


def test_options_under_their_present_names() -> None:
    for name in ("hpsv2", "imagereward", "aesthetic", "hpsv3"):
        found = identity.current_options(name, {"weights": "a.pt", "device": "cpu"})
        assert found == {"checkpoint": "a.pt", "device": "cpu"}
    assert identity.current_options("package.module:Mine", {"weights": [1, 2]}) == {"weights": [1, 2]}
    assert identity.current_options("hpsv2", {}) == {}


def test_nested_settings_by_dotted_names() -> None:
    nested = {"a": {"b": {"c": 1}, "d": []}, "e": {}, "f": None}
    assert identity.flatten(nested) == {"a.b.c": 1, "a.d": [], "e": {}, "f": None}


def test_the_hash_of_prompts_sees_order_and_metadata_but_not_the_order_of_keys() -> None:
    found = identity.prompts_hash(ROWS)
    assert len(found) == 64
    assert found == identity.prompts_hash([{"tag": "one", "prompt": "a cat"}, {"prompt": "a dog"}])
    for other in (ROWS[::-1], ROWS[:1], [{"prompt": "a cat"}, {"prompt": "a dog"}], [{"prompt": "a çat"}]):
        assert identity.prompts_hash(other) != found


def test_the_hash_of_weights_sees_the_matrix_its_rewards_and_its_grid() -> None:
    found = identity.weights_hash(W)
    assert found == identity.weights_hash(WeightMatrix(W.rewards, SIGMAS, W.matrix.copy(), [0.5, 0.5]))
    changed = W.matrix.copy()
    changed[0, 0] = np.nextafter(changed[0, 0], 1)
    for other in (
        WeightMatrix(W.rewards, SIGMAS, changed, [0.5, 0.5]),
        WeightMatrix(("ocr", "detail"), SIGMAS, W.matrix, [0.5, 0.5]),
        WeightMatrix(W.rewards, [0.0, 0.25, 1.0], W.matrix, [0.5, 0.5]),
        WeightMatrix(W.rewards, SIGMAS, W.matrix, [0.5, 0.5], nu=[1, 2]),
    ):
        assert identity.weights_hash(other) != found
    assert identity.weights_hash(WeightMatrix(W.rewards, SIGMAS, W.matrix, [0.5, 0.5], nu=[3, 3])) == found


def test_every_seed_prompt_number_and_purpose_has_its_own_seed() -> None:
    first = identity.seed_of(0, "a cat", 0)
    assert first == identity.seed_of(0, "a cat", 0, "proposal") == 3484526617
    others = [
        identity.seed_of(1, "a cat", 0),
        identity.seed_of(0, "a dog", 0),
        identity.seed_of(0, "a cat", 1),
        identity.seed_of(0, "a cat", 0, "noise"),
    ]
    assert len({first, *others}) == 5
    assert all(0 <= seed < 2**32 for seed in others)
