"""A training loop with W on the embedded policy: DiffusionNFT with one reward per denoising step.

python examples/own_training_loop.py
"""

import argparse

import torch

import recast
from recast import config, prompts, rewards
from recast.flow import families, lora, sampling
from recast.flow.generate import start_noise
from recast.flow.policy import conditioned
from recast.train import nft
from recast.train.advantage import advantages, by_sigma, optimality

# Gain curves of three rewards of the embedded world at T = 10, as measured by `recast estimate recipes/shapes.yaml`.
SIGMAS = [0.0, 0.009, 0.278, 0.465, 0.602, 0.707, 0.790, 0.858, 0.913, 0.960, 1.0]
CURVES = {
    "composition": [0.497, 0.497, 0.497, 0.496, 0.487, 0.442, 0.246, 0.034, 0.009, 0.0, 0.0],
    "alignment": [0.284, 0.284, 0.280, 0.277, 0.274, 0.251, 0.140, 0.020, 0.0, 0.0, 0.0],
    "detail": [0.417, 0.412, 0.123, 0.081, 0.058, 0.040, 0.015, 0.003, 0.0, 0.0, 0.0],
}


def train(
    epochs: int = 8,
    prompt_count: int = 12,
    images_per_prompt: int = 16,
    steps: int = 10,
    trained_steps: int = 2,
    updates: int = 4,
    seed: int = 0,
) -> list[dict[str, float]]:
    """Train the policy; returns and prints the mean rewards and the loss of every epoch."""
    policy = families.load(config.policy(model="shapes", device="cpu"))
    # Of the adapters, "default" is trained, "old" samples, and "base" is the network without them.
    adapters = lora.Adapters(policy.network, policy.targets)
    optimizer = torch.optim.AdamW(adapters.parameters, lr=1e-3)
    models = {name: rewards.load(name) for name in CURVES}
    sigmas = policy.sigmas(steps)  # the sampler's own grid
    curves = recast.GainCurves(tuple(CURVES), SIGMAS, list(CURVES.values())).resample(sigmas)
    W = recast.weigh(curves, budget={"composition": 1, "alignment": 1, "detail": 1})

    rows = [row for row in prompts.load("shapes:train") if row["tag"] == "single"][:prompt_count]
    texts = [row["prompt"] for row in rows for _ in range(images_per_prompt)]  # such as "a red cross"
    groups = torch.arange(len(texts)) // images_per_prompt  # images of one prompt are compared with each other
    condition = policy.condition(texts)
    random = torch.Generator().manual_seed(seed)
    log = []
    for epoch in range(epochs):
        # Sample images with the old policy and score them once.
        seeds = torch.randint(2**31, (len(texts),), generator=random).tolist()
        with torch.no_grad(), adapters.using("old"):
            start = start_noise(policy.latent_shape, seeds)
            clean = sampling.sample(conditioned(policy, condition), start, sigmas)
            scores = torch.from_numpy(rewards.score(models, policy.decode(clean), texts).T)  # (B, m)

        # Each image is trained at a few random levels. Its advantage there is found by σ, not by the slot's number.
        steps_of = torch.rand(len(texts), steps, generator=random).argsort(1)[:, :trained_steps]
        levels = torch.tensor(sigmas)[steps_of + 1]  # (B, k)
        r = optimality(by_sigma(advantages(scores, groups, W, mode="reward"), W, levels)).float()  # (B, k) in [0, 1]

        # The optimizer steps: (image, level) pairs in random order, in `updates` batches.
        losses = []
        for pair in torch.randperm(levels.numel(), generator=random).chunk(updates):
            image, slot = pair // trained_steps, pair % trained_steps
            x_0, sigma, asked = clean[image], levels[image, slot], condition.rows(image)
            noise = torch.randn(x_0.shape, generator=random)
            x_t = torch.lerp(x_0, noise, sigma[:, None, None, None])
            with torch.no_grad(), adapters.using("old"):
                v_old = policy.velocity(x_t, sigma, asked)
            with torch.no_grad(), adapters.using("base"):
                v_base = policy.velocity(x_t, sigma, asked)
            v = policy.velocity(x_t, sigma, asked)
            loss = nft.loss(v, v_old, x_0, noise, sigma, r[image, slot], v_base=v_base, kl_weight=1.0).total.mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(adapters.parameters, 1.0)
            optimizer.step()
            losses.append(loss.item())
        adapters.update_old()  # the next epoch samples with the policy that was just trained

        means = dict(zip(models, scores.mean(0).tolist(), strict=True))
        log.append({"mean reward": scores.mean().item(), **means, "loss": sum(losses) / len(losses)})
        print(f"epoch {epoch + 1}:", "  ".join(f"{name} {value:.3f}" for name, value in log[-1].items()), flush=True)
    return log


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--prompt-count", type=int, default=12, help="prompts, the same ones in every epoch")
    parser.add_argument("--images-per-prompt", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10, help="T, the number of denoising steps")
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))
