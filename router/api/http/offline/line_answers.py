"""Answers the lines of batches in the same way as other requests: as calls of their tenants, in the bulk lane."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from penstock.errors import PenstockError, Unavailable
from router.api.dialect import Dialect, ErrorShape, Json
from router.api.http.error_answers import shape_for
from router.api.http.generation import GenerationCalls
from router.api.http.streams import internal_error
from router.api.prepare import RequestPreparer


class LineAnswers:
    """Answers the lines of batches. Implements `LineAnswerer` of `router.batches`."""

    def __init__(
        self,
        calls: GenerationCalls,
        preparer: RequestPreparer,
        dialects: Mapping[str, Dialect[Any]],
        shapes: Mapping[str, ErrorShape],
    ) -> None:
        """`dialects` holds the dialect of each endpoint that a batch may name, by path; `shapes` holds error formats
        other than OpenAI's, by the prefix of their paths.
        """
        self._calls = calls
        self._preparer = preparer
        self._dialects = dialects
        self._shapes = shapes

    async def __call__(self, tenant: str, endpoint: str, body: bytes) -> tuple[int, str, Json]:
        """Returns the status, the id and the body of the answer. Raises Unavailable if the line may be retried."""
        request_id = uuid.uuid4().hex
        try:
            caller = self._preparer.tenants.named(tenant)
            answer = await self._calls.answer_offline(caller, endpoint, body, self._dialects[endpoint], request_id)
            return answer.status_code, request_id, json.loads(bytes(answer.body))
        except Unavailable:
            raise
        except PenstockError as error:
            problem = error
        except Exception as error:
            problem = internal_error(error)
        status, answer_body = shape_for(endpoint, self._shapes)(problem)
        return status, request_id, answer_body
