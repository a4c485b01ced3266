"""Numbers printed in the paper, typed in as data."""

REWARDS = ("clipscore", "hpsv2", "ocr", "pickscore")
STEPS = 25
BUDGETS = ((1, 1, 1, 1), (1, 1, 1, 2), (1, 1, 2, 1), (1, 2, 1, 1), (2, 1, 1, 1))

# Tab. surrogate-sensitivity: Pearson, Spearman, peak t under either generator, total-gain ratio.
SURROGATE = {
    "clipscore": (0.879, 0.912, (17, 19), 0.94),
    "hpsv2": (0.847, 0.829, (15, 16), 0.81),
    "ocr": (0.862, 0.844, (17, 17), 0.92),
    "pickscore": (0.919, 0.915, (15, 16), 0.84),
}
# App. B.4, the sentence above the table.
PEARSON_RANGE, SPEARMAN_RANGE, PEAK_SHIFT = (0.84, 0.92), (0.82, 0.92), (0, 2)

# Tab. curve-drift: total gain at the base policy, at checkpoint 180, and what remains.
DRIFT = {
    "clipscore": (0.252, 0.036, 0.14),
    "hpsv2": (0.501, 0.024, 0.05),
    "ocr": (2.278, 0.028, 0.01),
    "pickscore": (0.209, 0.024, 0.11),
}
DRIFT_ALL = (3.241, 0.113, 0.03)

# App. B.3: D at the clean end under π⁺, for the same run as Tab. curve-drift's base column.
CLEAN_END = {"clipscore": 0.245, "hpsv2": 0.501, "pickscore": 0.209}

# Sec. 3.4: iterations of Alg. 3 at m <= 4, T <= 25.
ITERATIONS_BELOW = 100
