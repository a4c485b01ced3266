"""Pairwise verdicts by a multimodal model: what is asked, what was answered, and what it adds up to."""
