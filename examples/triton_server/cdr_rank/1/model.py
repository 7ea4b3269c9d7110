"""NVIDIA Triton's python backend: facts of a store ranked for the session that a request brings.

The session travels as its JSON (``Session.to_json``), so that any instance answers any request; the caller updates it
(``Session.update``) after each window. Requests that Triton hands over together are ranked together. The image needs
cdr_kernel (``pip install cdr-kernel`` into it, or an execution environment); the store is a folder of
``FactStore.save``, named by the parameter ``store`` in config.pbtxt.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # Triton's own, there inside the server only

from cdr_kernel import FactStore, Ranking, Retriever, Session, SessionEnded, rank_many

K = 10
"""How many facts where a request does not say."""


class TritonPythonModel:
    """What Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the store once."""
        config = json.loads(args["model_config"])
        self.retriever = Retriever(FactStore.load(config["parameters"]["store"]["string_value"]))

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request, in their order; what is wrong with one is its own error."""
        asked = [self._read(request) for request in requests]
        good = [each for each in asked if isinstance(each, tuple)]
        try:
            most = max((k for _, _, k in good), default=0)
            rankings = iter(rank_many([q for q, _, _ in good], self.retriever, [s for _, s, _ in good], k=most))
            answers = [next(rankings).take(np.arange(each[2])) if isinstance(each, tuple) else each for each in asked]
        except (ValueError, TypeError, IndexError):  # one of them cannot be ranked: find out which
            answers = [self._alone(*each) if isinstance(each, tuple) else each for each in asked]
        return [_response(answer) for answer in answers]

    def _read(self, request: Any) -> tuple[Any, Session, int] | Exception:
        """Query [D], session and k of a request."""

        def tensor(name: str) -> Any:
            found = pb_utils.get_input_tensor_by_name(request, name)
            return None if found is None else found.as_numpy()

        try:
            k = tensor("K")
            session = Session.from_json(tensor("SESSION").item().decode())
            session.check_open(self.retriever.store.newest)
            return tensor("QUERY"), session, K if k is None else int(k[0])
        except (SessionEnded, ValueError, TypeError, AttributeError) as error:
            return error

    def _alone(self, query: Any, session: Session, k: int) -> Ranking | Exception:
        try:
            return rank_many([query], self.retriever, [session], k=k)[0]
        except (ValueError, TypeError) as error:
            return error


def _response(answer: Ranking | Exception) -> Any:
    if isinstance(answer, Exception):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{type(answer).__name__}: {answer}"))
    columns = {
        "IDS": np.array([fact.id.encode() for fact in answer.facts], np.object_),
        "TEXTS": np.array([fact.text.encode() for fact in answer.facts], np.object_),
        "SCORE": answer.score,
        "NOVELTY": answer.novelty,
    }
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, column) for name, column in columns.items()])
