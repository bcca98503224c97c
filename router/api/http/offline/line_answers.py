"""Answers the lines of batches by the same path as all other requests: as calls of their tenants, in the bulk lane."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from penstock.errors import PenstockError, Unavailable
from router.api.dialect import Dialect, ErrorShape, Json
from router.api.http.error_answers import openai_error
from router.api.http.generation import GenerationCalls
from router.api.http.streams import internal_error
from router.api.prepare import RequestPreparer


class LineAnswers:
    """A `LineAnswerer` of `router.batches`."""

    def __init__(
        self,
        calls: GenerationCalls,
        preparer: RequestPreparer,
        dialects: Mapping[str, Dialect[Any]],
        shapes: Mapping[str, ErrorShape],
    ) -> None:
        """`dialects` are those of the endpoints that a batch may name; `shapes` those of errors, by their paths."""
        self._calls = calls
        self._preparer = preparer
        self._dialects = dialects
        self._shapes = shapes

    async def __call__(self, tenant: str, endpoint: str, body: bytes) -> tuple[int, str, Json]:
        """Returns the status, the id and the body of the answer. Raises Unavailable if it may be tried again."""
        request_id = uuid.uuid4().hex
        try:
            caller = self._preparer.tenants.named(tenant)
            answer = await self._calls.answer_offline(caller, endpoint, body, self._dialects[endpoint])
            return answer.status_code, request_id, json.loads(bytes(answer.body))
        except Unavailable:
            raise
        except PenstockError as error:
            problem = error
        except Exception as error:
            problem = internal_error(error)
        shape = next((each for start, each in self._shapes.items() if endpoint.startswith(start)), openai_error)
        status, shown = shape(problem)
        return status, request_id, shown
