"""The unit tests that LangChain has for chat models, run on ours."""

import pytest

pytest.importorskip("langchain_tests.unit_tests")

from langchain_tests.unit_tests import ChatModelUnitTests

from entroprefill_rag.integrations.langchain import ChatEntroPrefill


class TestF23ChatEntroPrefill(ChatModelUnitTests):
    @property
    def chat_model_class(self):
        return ChatEntroPrefill

    @property
    def chat_model_params(self):
        return {"model": "tiny"}

    @property
    def supports_model_override(self):
        return False
