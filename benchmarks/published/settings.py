"""Every setting of the paper and of DiffusionNFT beside ours: the table in docs/guides/sd35.md.

    git clone https://github.com/NVlabs/DiffusionNFT
    python benchmarks/published/settings.py --source DiffusionNFT

The values of DiffusionNFT are those of its configuration `sd3_multi_reward` (config/nft.py), which is executed, or
lines of scripts/train_nft_sd3.py, which are searched for; ours are read from recipes/sd35/ocr.yaml with its defaults.
What the paper says was read from its text. Writes results/published/settings.json and prints the table, which
tests/test_docs.py compares with the recipe and the page.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from recast import config
from recast.core import artifact

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/published/settings.json"
RECIPE = ROOT / "recipes/sd35/ocr.yaml"
SCRIPT = "scripts/train_nft_sd3.py"


class Row(NamedTuple):
    """One setting: what the paper says, where DiffusionNFT has it, ours by dotted names, and a remark.

    `theirs` is a dotted key of its configuration, or a regular expression with one group for its script.
    """

    name: str
    paper: str
    theirs: str
    ours: str
    remark: str = ""


ROWS = (
    Row("rank of LoRA", "32 (E.2)", r"r=(\d+), lora_alpha", "train.rank"),
    Row("alpha of LoRA", "64 (E.2)", r"lora_alpha=(\d+)", "train.alpha"),
    Row("learning rate", "3e-4 (E.2)", "train.learning_rate", "train.learning_rate"),
    Row("schedule of the learning rate", "“decayed (`decay_type=1`)” (E.2)", "", "train.schedule", "1"),
    Row("AdamW's β1, β2", "0.9, 0.999 (E.2)", "train.adam_beta1, train.adam_beta2", "train.betas"),
    Row("AdamW's ε", "1e-8 (E.2)", "train.adam_epsilon", "train.epsilon"),
    Row("weight decay", "1e-4 (E.2)", "train.adam_weight_decay", "train.weight_decay"),
    Row("decay of the old policy", "`decay_type=1` (E.2)", "decay_type", "train.decay", "1"),
    Row("β of the loss", "0.1 (4.1, E.2)", "beta", "train.beta"),
    Row("KL weight", "–", "train.beta", "train.kl_weight", "DiffusionNFT's"),
    Row("decay of the averaged adapter", "–", r"parameters, decay=([\d.]+)", "train.ema", "DiffusionNFT's"),
    Row("clip of the advantage", "–", "train.adv_clip_max", "train.advantage_clip", "DiffusionNFT's"),
    Row("clip of the gradient", "–", "train.max_grad_norm", "train.clip_norm", "DiffusionNFT's"),
    Row("standard deviation over the whole batch", "–", "sample.global_std", "train.spread", "DiffusionNFT's"),
    Row("sampling steps T", "25 (4.1, E.2)", "sample.num_steps", "estimate.steps"),
    Row("levels trained per image", "–", "train.timestep_fraction", "train.fraction", "24 of 25; DiffusionNFT's"),
    Row("sampler of training", "–", "sample.solver", "", "DiffusionNFT's; fixed here"),
    Row("guidance in training", "–", "sample.guidance_scale", "policy.guidance", "DiffusionNFT's"),
    Row("images per prompt", "24 (E.2)", "sample.num_image_per_prompt", "train.images_per_prompt"),
    Row(
        "images per GPU, micro-batch × accumulation",
        "24 × 6 (E.2)",
        "train.batch_size, train.gradient_accumulation_steps",
        "train.micro_batch",
        "4",
    ),
    Row("images per optimizer step", "1152 (4.1, E.2)", "", "train.batch", "the same there: 48 prompts × 24 images"),
    Row("tokens of T5", "–", r"max_sequence_length=(\d+)", "policy.max_sequence_length", "DiffusionNFT's"),
    Row("precision", "–", "mixed_precision", "train.precision", "2"),
    Row("resolution", "512 (4.1)", "resolution", "policy.resolution"),
    Row("steps of the second stage", "60 further ones (4.1)", "", "train.epochs", "one step per epoch"),
    Row("start of the second stage", "“resumes from its checkpoint” (4.1)", "", "train.resume_from", "3"),
    Row("evaluation steps", "40 (4.1)", "sample.eval_num_steps", "evaluate.steps"),
    Row("evaluation guidance", "4.5 (4.1)", "sample.guidance_scale", "evaluate.guidance", "the paper's"),
    Row("evaluation solver", "–", r'deterministic=True,\s+solver="(\w+)"', "evaluate.solver", "DiffusionNFT's"),
    Row("evaluation seeds", "42 + index (E.2)", "", "evaluate.seed", "of the first line"),
)


def theirs(folder: Path, row: Row) -> str:
    """DiffusionNFT's value of a setting."""
    if not row.theirs:
        return "–"
    if "(" in row.theirs:
        found = re.search(row.theirs, (folder / SCRIPT).read_text())
        assert found is not None, row
        return found[1]
    values = []
    for key in row.theirs.split(", "):
        value: Any = configuration(folder)
        for part in key.split("."):
            value = getattr(value, part)
        values.append(f"{value:g}" if isinstance(value, float) else str(value))
    return ", ".join(values)


def configuration(folder: Path) -> Any:
    """`sd3_multi_reward` of config/nft.py, with stand-ins for ml_collections and `imp`, which Python 3.12 dropped."""
    kind = type("ConfigDict", (types.SimpleNamespace,), {})
    base: dict[str, Any] = {}
    stand_ins: dict[str, Any] = {
        "ml_collections": types.SimpleNamespace(ConfigDict=kind),
        "imp": types.SimpleNamespace(load_source=lambda *_: types.SimpleNamespace(**base)),
    }
    nft: dict[str, Any] = {"__file__": str(folder / "config/nft.py")}
    with mock.patch.dict(sys.modules, stand_ins):
        for name, space in (("base", base), ("nft", nft)):
            exec((folder / f"config/{name}.py").read_text(), space)
        return nft["sd3_multi_reward"]()


def ours(row: Row) -> str:
    """Our value of a setting, by the recipe."""
    if not row.ours:
        return "dpm2"
    value: Any = config.load(RECIPE)
    for part in row.ours.split("."):
        value = getattr(value, part)
    return ", ".join(f"{each:g}" if isinstance(each, float) else str(each) for each in _listed(value))


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def table(found: dict[str, str]) -> list[str]:
    """The lines of the table, given DiffusionNFT's values by the name of the setting."""
    lines = ["| setting | paper | DiffusionNFT | ours | |", "|---|---|---|---|---|"]
    for row in ROWS:
        key = f"`{row.ours}`: {ours(row)}" if row.ours else ours(row)
        remark = {"1": "see 1 below", "2": "see 2 below", "3": "see 3 below", "4": "see 4 below"}.get(
            row.remark, row.remark
        )
        lines.append(f"| {row.name} | {row.paper} | {found[row.name]} | {key} | {remark} |")
    return lines


def main() -> None:
    """Read DiffusionNFT's settings, write them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="a clone of NVlabs/DiffusionNFT")
    folder = parser.parse_args().source
    found = {row.name: theirs(folder, row) for row in ROWS}
    commit = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    artifact.write(
        RESULTS, "recast.settings", {"source": "NVlabs/DiffusionNFT", "commit": commit.stdout.strip(), "found": found}
    )
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
