"""The rule inside a transformers model."""
