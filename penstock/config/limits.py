"""Settings that bound calls to a router: sizes, counts and times."""

from __future__ import annotations

from pydantic import Field

from penstock.config.base import FrozenConfig


class LimitsConfig(FrozenConfig):
    """Largest calls to a router's public ports. Larger ones are refused, with the field's name."""

    request_bytes: int = Field(8 * 1024 * 1024, ge=1024)
    """Bytes of a gRPC message or an HTTP body."""
    header_bytes: int = Field(16 * 1024, ge=1024)
    """Bytes of gRPC metadata or HTTP headers."""
    prompt_characters: int = Field(4_000_000, ge=1)
    """Characters of a text prompt, or of all messages and tools together; a long prompt may also have at most 64
    characters per token of the context.
    """
    prompt_tokens: int = Field(1 << 20, ge=1)
    """Tokens of a prompt, which must also fit into the workers' context."""
    messages: int = Field(4096, ge=1)
    """Messages of a chat, and tool calls in them."""
    tools: int = Field(256, ge=1)
    """Tools of a chat."""
    tool_characters: int = Field(1 << 20, ge=1)
    """Characters of the descriptions and schemas of a chat's tools."""
    completions: int = Field(128, ge=1)
    """Completions of a call: n, times the prompts of an HTTP call."""
    stop_token_ids: int = Field(256, ge=1)
    """Stop token ids of a call."""
    logit_bias: int = Field(1024, ge=1)
    """Logit bias entries of a call."""
    allowed_token_ids: int = Field(1024, ge=1)
    """Allowed token ids of a call."""
    prompt_logprobs: int = Field(1 << 16, ge=1)
    """Log-probabilities of prompt tokens and of their alternatives in an answer, over all its completions."""
    connections: int = Field(8192, ge=1)
    """Connections to each of the two public ports; fewer where the process may not open twice as many files."""
    connections_per_peer: int = Field(4096, ge=1)
    """HTTP connections from one IPv4 address, or one IPv6 network of 64 bits."""
    calls: int = Field(16384, ge=1)
    """Concurrent gRPC calls of all connections; further ones are refused."""
    header_timeout_s: float = Field(30.0, gt=0)
    """Seconds within which a new connection must begin its first request and the headers of a later request must
    arrive.
    """
    idle_timeout_s: float = Field(120.0, gt=0)
    """Seconds after which a connection without a request is closed."""
    connection_age_s: float = Field(3600.0, gt=0)
    """Seconds after which a gRPC connection takes no new calls, so that its client connects again; calls in flight go
    on to their end."""
    ping_strikes: int = Field(16, ge=1)
    """gRPC pings sent faster than two a second, without data in between, after which a connection is closed."""
    control_bytes_per_s: int = Field(64 * 1024, ge=1024)
    """Bytes that a gRPC connection may send each second beyond its calls, such as pings; one that sends more is
    closed."""
    body_timeout_s: float = Field(30.0, gt=0)
    """Seconds within which the message of a gRPC call or the body of an HTTP request must arrive."""
    bodies_bytes: int = Field(1 << 30, ge=1024)
    """Bytes of all HTTP bodies together that are received but not parsed yet; further bodies are refused."""
    write_stall_s: float = Field(60.0, gt=0)
    """Seconds for which a client may read nothing from its stream before it is disconnected."""
    read_grace_s: float = Field(60.0, ge=0)
    """Seconds after a request's deadline during which its client may still read what was generated in time."""
    text_queue_characters: int = Field(1 << 28, ge=1)
    """Characters of prompts that may wait for the threads that parse, template and tokenize them; beyond that, the
    tenant with most of them waiting is refused.
    """
    streams_per_connection: int = Field(1024, ge=1)
    """Concurrent gRPC calls of a connection; further ones wait."""
