"""A self-test of a recipe on the user's machine: device against CPU, every stage at tiny settings, kill and resume."""

from recast.selftest.report import Check, Report

__all__ = ["Check", "Report"]
