"""Lets the tests of the rule import what they share (``synthetic``, ``removal_cases``), whatever the import mode."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
