"""Policies and samplers, on torch."""

__all__: list[str] = []
