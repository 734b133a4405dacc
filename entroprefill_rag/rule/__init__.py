"""The method itself: pure functions on tensors and numbers. Knows no model and imports no transformers."""
