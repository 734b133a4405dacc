"""The benchmark: what pruning in mid-prefill gives and costs, beside what one would do instead.

Same model, same questions, same prompt template, one process, methods in an order that is drawn anew for each question.
Questions hold labelled passages; no text of theirs is kept, only numbers and ids.
"""

from __future__ import annotations
