"""`recast plan`: what a recipe takes in calls, FLOPs, memory, hours and disk, computed before anything is run."""

from recast.plan.cards import CARDS, Card
from recast.plan.result import Machine, Plan
from recast.plan.stage import plan

__all__ = ["CARDS", "Card", "Machine", "Plan", "plan"]
