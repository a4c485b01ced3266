"""The same training on two processes under DDP and under DeepSpeed's ZeRO 1 and 2, killed with signal 9 and resumed.

Not in the suite: DeepSpeed is not among its packages. `DS_BUILD_OPS=0 pip install deepspeed`, then
`DS_ACCELERATOR=cpu python tests/train/deepspeed_run.py FOLDER`; its first start compiles an operator for minutes.
"""

import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from test_train_processes import TORCHRUN, adapters, command, lines, run

from recast import WeightMatrix, config
from recast.flow import families

SMALL = "train.micro_batch=2"  # two micro-batches per optimizer step
LORA = "lora/pytorch_lora_weights.safetensors"


def train(out: Path, stage: int = 0, code: int = 0, **more: str) -> str:
    """Train, under DDP for stage 0, with a reward that draws from the global generators."""
    zero = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage)} if stage else {}
    return run(command(out, SMALL, launcher=TORCHRUN), code, NOISE="1", **zero, **more)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    table = np.stack([np.linspace(0.9, 0.1, 4), np.linspace(0.1, 0.9, 4)]) / 4
    sigmas = families.load(config.policy(model="shapes")).sigmas(4)
    WeightMatrix(("detail", "rewards:Deadly"), sigmas, table, table.sum(1)).save(folder / "weights.json")
    ddp = folder / "ddp"
    sizes = train(ddp).splitlines()[0]
    for stage in (1, 2):
        whole, killed = folder / f"zero-{stage}", folder / f"zero-{stage}-killed"
        said = train(whole, stage)
        assert sizes in said, (sizes, said)
        assert "DeepSpeed" in said  # it speaks up; accelerate would pass over it in silence on a CPU
        off = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(lines(whole), lines(ddp), strict=True)]
        one, two = (load_file(each / LORA) for each in (whole, ddp))
        moved = max(np.abs(one[key] - two[key]).max() for key in one)
        assert max(off) < 2e-3, off
        assert moved < 2e-3, moved  # as between one process and two
        train(killed, stage, code=1, FATAL="6")
        train(killed, stage)
        assert adapters(killed) == adapters(whole)
        assert lines(killed) == lines(whole)
        print(f"ZeRO {stage}: losses off by {max(off):.1e}, adapters by {moved:.1e}, resumed to the bit", flush=True)
    for each in (ddp, folder / "zero-2"):
        kept = each / "checkpoints/epoch-00004"
        kept.rename(folder / f"{each.name}-last")
    train(ddp, 2)
    train(folder / "zero-2")
    print("DDP went on under ZeRO 2, and ZeRO 2 under DDP:", [lines(folder / n)[-1]["loss"] for n in ("ddp", "zero-2")])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
