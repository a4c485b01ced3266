"""Policies and samplers, on torch."""
