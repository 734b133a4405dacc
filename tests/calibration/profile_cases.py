"""A small profile, for tests."""

from entroprefill_rag.calibration.profile import ModelProfile, Training


def profile(**more):
    """A sound profile of a model with six layers, four heads and two groups, with changes."""
    first = (1.0, 0.0, 0.0, 0.0)
    data = {
        "model": "tiny",
        "fingerprints": ("0123456789abcdef",),
        "dtype": "float32",
        "query_heads": 4,
        "kv_heads": 2,
        "depth": 6,
        "layers": (2, 3),
        "weights": ((2, first), (3, first)),
        "mass_min": 0.07,
        "mu_min": 0.02,
        "caps": {"0.5": 0.3},
        "training": Training(
            source="packaged", questions=2, seed=0, forms={"cloze": 2}, folds=2, tokens=(10, 20), chance=0.25
        ),
        "evidence": (),
    }
    return ModelProfile(**(data | more))
