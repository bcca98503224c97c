"""Names what other servers have and Penstock does not, by path. Pure."""

from __future__ import annotations

# Calls of OpenAI's API and of other servers, by the beginning of their path: what Penstock does not serve.
_UNSERVED = {
    "/v1/audio": "speech and transcription",
    "/v1/images": "image generation",
    "/v1/videos": "video generation",
    "/v1/embeddings": "embeddings",
    "/v1/moderations": "moderation",
    "/v1/rerank": "reranking",
    "/v2/rerank": "reranking",
    "/rerank": "reranking",
    "/v1/score": "scoring",
    "/score": "scoring",
    "/pooling": "pooling",
    "/classify": "classification",
    "/v1/realtime": "realtime sessions",
    "/v1/files": "files",
    "/v1/uploads": "files",
    "/v1/batches": "batches of files",
    "/v1/vector_stores": "vector stores",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/evals": "evaluations",
    "/v1/assistants": "assistants",
    "/v1/threads": "assistants",
    "/v1/conversations": "stored conversations",
    "/v1/containers": "containers",
    "/v1/load_lora_adapter": "loading of adapters by HTTP (the setting adapters names them)",
    "/v1/unload_lora_adapter": "unloading of adapters by HTTP (the setting adapters names them)",
    "/invocations": "SageMaker's calls",
    "/generate": "call of this name (POST /v1/completions takes text and token ids)",
}


def unserved(path: str) -> str | None:
    """Returns what a path stands for elsewhere and not here; None for any other path."""
    for start, what in _UNSERVED.items():
        if path == start or path.startswith(f"{start}/"):
            return what
    return None
