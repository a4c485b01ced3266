"""`recast run` and `recast sweep`: all stages of a recipe, and comparisons over methods, budgets and seeds."""

__all__: list[str] = []
