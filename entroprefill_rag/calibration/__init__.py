"""Calibrated profiles: which layers and heads of a model find evidence, measured without labels.

A profile decides the order in which chunks are tried, and which layers are looked at. Caps, envelope and audit do not
depend on it: a bad profile costs saving or quality, never a guarantee.
"""

from __future__ import annotations
