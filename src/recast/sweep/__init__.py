"""`recast run` and `recast sweep`: every stage of a recipe, and comparisons over methods, budgets and seeds."""
