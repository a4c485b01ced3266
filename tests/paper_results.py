"""The paper's result tables, typed in: (mean over three seeds, static then ReCAST) by budget, and the pooled ones."""

BUDGETS = ((1, 1, 1, 1), (1, 1, 1, 2), (1, 1, 2, 1), (1, 2, 1, 1), (2, 1, 1, 1))
TRAINED = {"ocr": ("clipscore", "hpsv2", "pickscore", "ocr"), "geneval": ("clipscore", "hpsv2", "pickscore", "geneval")}
HELD_OUT = ("imagereward", "aesthetic", "hpsv3", "unifiedreward")

# Tab. perlam-ocr and Tab. preagg-geneval: aggregate, then the four rewards; static and ReCAST.
REWARDS = {
    "ocr": [
        ((2.387, 0.315, 0.288, 0.890, 0.894), (2.435, 0.321, 0.306, 0.900, 0.908)),
        ((3.251, 0.308, 0.255, 0.869, 0.910), (3.383, 0.319, 0.290, 0.887, 0.944)),
        ((3.259, 0.313, 0.296, 0.898, 0.854), (3.338, 0.320, 0.306, 0.903, 0.907)),
        ((2.709, 0.314, 0.299, 0.889, 0.908), (2.720, 0.318, 0.314, 0.906, 0.869)),
        ((2.727, 0.317, 0.302, 0.892, 0.900), (2.723, 0.323, 0.302, 0.901, 0.874)),
    ],
    "geneval": [
        ((2.390, 0.298, 0.316, 0.914, 0.861), (2.392, 0.298, 0.308, 0.909, 0.877)),
        ((3.300, 0.299, 0.309, 0.908, 0.892), (3.290, 0.299, 0.307, 0.906, 0.889)),
        ((3.321, 0.298, 0.319, 0.914, 0.875), (3.322, 0.297, 0.322, 0.913, 0.877)),
        ((2.715, 0.299, 0.313, 0.915, 0.876), (2.715, 0.299, 0.322, 0.908, 0.865)),
        ((2.677, 0.301, 0.309, 0.904, 0.863), (2.671, 0.300, 0.302, 0.906, 0.864)),
    ],
}
# Tab. perlam-panel-ocr and Tab. perlam-panel-geneval.
PANELS = {
    "ocr": [
        ((1.433, 5.493, 12.86, 3.179), (1.476, 5.574, 13.16, 3.154)),
        ((1.341, 5.411, 12.06, 3.146), (1.420, 5.542, 12.44, 3.129)),
        ((1.438, 5.525, 13.00, 3.159), (1.499, 5.571, 13.25, 3.190)),
        ((1.434, 5.481, 12.67, 3.129), (1.517, 5.622, 13.44, 3.181)),
        ((1.461, 5.521, 13.13, 3.158), (1.499, 5.581, 13.41, 3.226)),
    ],
    "geneval": [
        ((1.372, 6.057, 8.73, 2.745), (1.358, 6.006, 9.30, 2.741)),
        ((1.268, 5.882, 8.43, 2.705), (1.317, 5.938, 8.61, 2.709)),
        ((1.234, 5.913, 8.19, 2.698), (1.386, 6.040, 8.70, 2.736)),
        ((0.990, 5.699, 7.23, 2.588), (1.369, 6.054, 8.46, 2.706)),
        ((1.127, 5.768, 7.49, 2.618), (1.014, 5.800, 7.81, 2.633)),
    ],
}
DOMINANCE = {
    ("rewards", "ocr"): ("first", "first", "first", "mixed", "mixed"),
    ("rewards", "geneval"): ("mixed", "mixed", "mixed", "mixed", "mixed"),
    ("panels", "ocr"): ("mixed", "mixed", "first", "first", "first"),
    ("panels", "geneval"): ("mixed", "first", "first", "first", "mixed"),
}
# Tab. trainreward and Tab. panels: static and ReCAST.
POOLED = {
    "ocr": {
        "aggregate": (2.867, 2.920),
        "clipscore": (0.313, 0.320),
        "hpsv2": (0.288, 0.303),
        "pickscore": (0.888, 0.899),
        "ocr": (0.893, 0.900),
        "imagereward": (1.422, 1.482),
        "aesthetic": (5.486, 5.578),
        "hpsv3": (12.74, 13.14),
        "unifiedreward": (3.154, 3.176),
    },
    "geneval": {
        "aggregate": (2.881, 2.878),
        "clipscore": (0.299, 0.299),
        "hpsv2": (0.313, 0.312),
        "pickscore": (0.911, 0.908),
        "geneval": (0.873, 0.874),
        "imagereward": (1.198, 1.289),
        "aesthetic": (5.864, 5.968),
        "hpsv3": (8.02, 8.58),
        "unifiedreward": (2.671, 2.705),
    },
}
# Tab. sinkhorn-ablation-perlam: the aggregate at each budget, and what the text says of it.
ABLATION = {
    "static": (2.3848, 3.2476, 3.2948, 2.5597, 2.6980),
    "row": (2.4242, 3.3514, 3.3781, 2.6721, 2.6969),
    "sinkhorn": (2.4650, 3.3564, 3.3564, 2.7960, 2.7038),
}
KERNEL, PROJECTION, TOTAL = 0.068, 0.031, 0.099
# Tab. MMRBv2-ocr: ReCAST's win rates by budget, and their means.
JUDGED = {
    "overall": (0.6538, 0.5580, 0.4780, 0.5365, 0.6325),
    "faithfulness": (0.6550, 0.5570, 0.5130, 0.5655, 0.6094),
    "aesthetics": (0.6438, 0.5397, 0.4736, 0.4674, 0.6242),
}
JUDGED_MEANS = {"overall": 0.5718, "faithfulness": 0.5800, "aesthetics": 0.5497}
