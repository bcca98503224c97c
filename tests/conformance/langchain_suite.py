"""LangChain's standard integration tests of chat models, with its OpenAI and its Anthropic client.

Runs in the suites' own environment, against the deployment at PENSTOCK_URL. The bundled model writes nothing sensible,
so tests that ask for the right answer, rather than for the right form, are expected to fail, each with its reason.
"""

from __future__ import annotations

import os

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000")


class TestChatOpenAI(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {
            "model": "penstock-tiny",
            "base_url": f"{URL}/v1",
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 200,
            "timeout": 60,
            "max_retries": 0,
        }

    @property
    def has_tool_calling(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_image_inputs(self) -> bool:
        return False
