"""UnifiedReward beside the published client and the scorer of DiffusionNFT: the request, and how answers are read.

    git clone https://github.com/CodeGoat24/UnifiedReward
    git clone https://github.com/NVlabs/DiffusionNFT
    pip install requests tqdm  # which the published client imports
    python benchmarks/published/unifiedreward.py --source UnifiedReward --nft DiffusionNFT

No model is run. The published client (`vllm_qwen/vllm_request.py`) makes its messages from PNG files and from the
question of `point_score_ACS_image_generation.py`, evaluated for each prompt; ours are those that `unifiedreward` would
send for the same images, with the template that `recast rewards setup` takes out of the same clone. DiffusionNFT's
pattern reads answers with a final score. A difference is 0 or 1 for a message, and the difference of the scores for an
answer. Writes results/published/unifiedreward.json; a few seconds.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from PIL import Image

from recast.core import artifact
from recast.rewards import check, setup
from recast.rewards.unifiedreward import UnifiedReward, parse

RESULTS = Path(__file__).parents[1] / "results" / "published"
CLIENT, SCORER = "vllm_qwen/vllm_request.py", "flow_grpo/unifiedreward_scorer.py"
PROMPTS = ["a red circle", "", 'the word "HELLO" & {prompt} [x]', "“zwei” Katzen 日本\nnext line", "a cat " * 300]
PICTURES = ("circle", "meadow", "text", "typo", "sign", "noise")
SIDES = (512, 384, 1024)
ANSWERS = (
    "Final Score: {}",
    "cat (animal): 1\n\nFinal Score:{}",
    "Final Score:\n{}",
    "Final Score: \n\n{}\n",
    "…Final Score: {}.",
)


def git(source: Path, *arguments: str) -> str:
    """The output of a git command in a clone."""
    return subprocess.run(["git", "-C", str(source), *arguments], capture_output=True, check=True, text=True).stdout


def module_of(source: Path, file: str) -> ModuleType:
    """A published module."""
    module = ModuleType(Path(file).stem)
    exec(compile(git(source, "show", f"HEAD:{file}"), file, "exec"), module.__dict__)
    return module


def functions(source: Path, file: str, *names: str) -> dict[str, Any]:
    """Published functions of a module whose other lines need packages or servers."""
    body = ast.parse(git(source, "show", f"HEAD:{file}")).body
    chosen: list[ast.stmt] = [node for node in body if isinstance(node, ast.FunctionDef) and node.name in names]
    space: dict[str, Any] = {"re": __import__("re")}
    exec(compile(ast.Module(chosen, []), file, "exec"), space)
    return space


def question_of(source: Path) -> Callable[[str], str]:
    """The published question for a prompt, evaluated by Python."""
    place = setup.SOURCES["unifiedreward"]
    body = ast.parse(git(source, "show", f"HEAD:{place.file}")).body
    node = next(each for each in body if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "problem")
    code = compile(ast.Expression(node.value), place.file, "eval")
    return lambda prompt: str(eval(code, {"prompt": prompt}))


def ours(source: Path, folder: Path) -> UnifiedReward:
    """The reward with the template of the clone."""
    place = setup.SOURCES["unifiedreward"].file
    artifact.write_text(folder / place, git(source, "show", f"HEAD:{place}"))
    return UnifiedReward(template=setup.store("unifiedreward", folder, folder / "template.txt")[0], concurrency=1)


def requests(source: Path, folder: Path) -> dict[str, list[float]]:
    """0 for every image, question and whole message that equals the published client's, else 1."""
    reward, question = ours(source, folder), question_of(source)
    client = module_of(source, CLIENT).VLMessageClient("http://localhost")
    found: dict[str, list[float]] = {"images": [], "questions": [], "messages": []}
    for side in SIDES:
        for name in PICTURES:
            pixels = (check.draw(name, side) * 255).round() / 255
            path = folder / f"{name}-{side}.png"
            Image.fromarray((pixels * 255).round().byte().permute(1, 2, 0).numpy()).save(path)
            for prompt in PROMPTS:
                sent: list[Any] = []
                reward.endpoint.post = lambda *given, sent=sent: sent.append(given[1]) or answer("3")  # type: ignore
                reward(pixels[None], [prompt])
                (mine,) = (body["messages"] for body in sent)
                theirs = client.build_messages({"images": [str(path)], "problem": question(prompt)})
                pairs = zip(mine[0]["content"], theirs[0]["content"], strict=True)
                for key, (one, other) in zip(("images", "questions"), pairs, strict=True):
                    found[key].append(float(one != other))
                found["messages"].append(float(mine != theirs))
    return found


def answer(score: str) -> dict[str, Any]:
    """A reply of the server."""
    return {"choices": [{"message": {"content": f"Final Score: {score}"}}]}


def readings(nft: Path) -> list[float]:
    """Differences of our final score and five times DiffusionNFT's reward."""
    extract = functions(nft, SCORER, "_extract_scores")["_extract_scores"]
    values = [f"{value:.{places}f}" for value in torch.linspace(1, 5, 41).tolist() for places in (1, 4)]
    texts = [form.format(value) for form in ANSWERS for value in [*values, "1", "3", "5"]]
    return [abs(parse(text)["score"] - theirs) for text, theirs in zip(texts, extract(texts), strict=True)]


def main() -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="a clone of CodeGoat24/UnifiedReward")
    parser.add_argument("--nft", type=Path, required=True, help="a clone of NVlabs/DiffusionNFT")
    given = parser.parse_args()
    os.environ.pop("UNIFIEDREWARD_API_KEY", None)
    with tempfile.TemporaryDirectory() as folder:
        found = requests(given.source, Path(folder))
    found["readings of final scores"] = readings(given.nft)
    content = {
        "reward": "unifiedreward",
        "source": f"CodeGoat24/UnifiedReward, {CLIENT}; answers: NVlabs/DiffusionNFT, {SCORER}",
        "commit": "; ".join(git(each, "rev-parse", "HEAD").strip() for each in (given.source, given.nft)),
        "compared": [{"what": what, "count": len(each), "largest": max(each)} for what, each in found.items()],
        "not_compared": [
            "answers of the published model, which was not run, and what vLLM makes of a request",
            "the mean of alignment, coherence and style: no published code averages them",
            "decoding: ours sends the paper's temperature 0, the published client only a do_sample of its own",
        ],
    }
    print(content)
    artifact.write(RESULTS / "unifiedreward.json", "recast.benchmark.published", content)


if __name__ == "__main__":
    main()
