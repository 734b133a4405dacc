"""What the tests of the LlamaIndex adapter share."""

from __future__ import annotations

from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.schema import NodeWithScore, TextNode
from tiny import LOOSE

SEEDED = LOOSE.model_copy(update={"audit": LOOSE.audit.model_copy(update={"seed": 7})})
STRICT = SEEDED.model_copy(update={"eps_row": 1e-9})
QUERY = "Which word is it, then?"


class Written(BaseEventHandler):
    """Keeps every event."""

    events: list = []  # noqa: RUF012  (a pydantic field)

    @classmethod
    def class_name(cls) -> str:
        return "Written"

    def handle(self, event, **kwargs):
        self.events.append(event)

    def names(self):
        return [type(event).__name__ for event in self.events]

    def of(self, name):
        return [event for event in self.events if type(event).__name__ == name]


def make_nodes(count=5, words=6):
    """Nodes of a few dozen bytes, as the tiny model's tokens are bytes."""
    return [
        NodeWithScore(
            node=TextNode(
                id_=f"n{i}",
                text=" ".join(f"word{i}{j}" for j in range(words)),
                metadata={"page": i},
                excluded_embed_metadata_keys=["page"],
            ),
            score=0.9 - i / 10,
        )
        for i in range(count)
    ]


def ids(nodes):
    return [node.node_id for node in nodes]
