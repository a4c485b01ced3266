"""Training: DiffusionNFT with a reward for every step."""
