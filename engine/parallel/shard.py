"""Computes a rank's share of a model under tensor parallelism: its heads, its part of each product, its layout of
pages.

Every rank has all layers and a part of each: query heads and the KV heads that they read, a part of the inner width of
each feed-forward block and of each expert, and a part of the vocabulary. If there are fewer KV heads than ranks,
several ranks hold the same head; a latent (one for all heads) is held by all. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.cache.kv_layout import KVLayout
from engine.models.config import ModelConfig
from engine.models.expert_config import MXFP4_GROUP
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of rank `rank` out of `num_ranks`."""

    rank: int = 0
    num_ranks: int = 1

    def span(self, size: int) -> range:
        """Returns this rank's part of `size` items; the last rank's may be shorter."""
        each = -(-size // self.num_ranks)
        return range(min(self.rank * each, size), min((self.rank + 1) * each, size))

    def kv_heads(self, num_kv_heads: int) -> range:
        """Returns the KV heads that this rank holds: its part, or a head that other ranks hold too."""
        if num_kv_heads >= self.num_ranks:
            return self.span(num_kv_heads)
        head = self.rank * num_kv_heads // self.num_ranks
        return range(head, head + 1)


WHOLE = Shard()


def check_degree(model: ModelConfig, num_ranks: int) -> None:
    """Raises ConfigError unless the model can be split evenly among that many ranks."""
    sizes = {"attention heads": model.num_heads, "of the feed-forward width": model.intermediate_size}
    if model.experts is not None:
        sizes["of an expert's width"] = model.experts.intermediate_size
        sizes["of the shared experts' width"] = model.experts.shared_size
        if model.experts.mxfp4:
            sizes["groups of an expert's inputs"] = model.experts.intermediate_size // MXFP4_GROUP
    for name, size in sizes.items():
        if size % num_ranks:
            raise ConfigError(
                f"engine.tensor_parallel = {num_ranks} does not divide the model's {size} {name}; give a number that "
                "does"
            )
    kv_heads = model.num_kv_heads
    if kv_heads % num_ranks and num_ranks % kv_heads:
        raise ConfigError(
            f"engine.tensor_parallel = {num_ranks} and the model's {kv_heads} KV heads: one must divide the other"
        )


def shard_model(model: ModelConfig, shard: Shard) -> ModelConfig:
    """Returns the dimensions that this rank computes; what is not split stays as it is."""
    if shard.num_ranks == 1:
        return model
    check_degree(model, shard.num_ranks)
    experts = model.experts
    if experts is not None:
        experts = replace(
            experts,
            intermediate_size=experts.intermediate_size // shard.num_ranks,
            shared_size=experts.shared_size // shard.num_ranks,
        )
    return replace(
        model,
        num_heads=model.num_heads // shard.num_ranks,
        num_kv_heads=len(shard.kv_heads(model.num_kv_heads)),
        intermediate_size=model.intermediate_size // shard.num_ranks,
        experts=experts,
    )


def shard_layout(layout: KVLayout, shard: Shard) -> KVLayout:
    """Returns the layout of a rank's pages, given that of the whole model's."""
    heads = shard.kv_heads(layout.num_kv_heads)
    whole = len(heads) == layout.num_kv_heads
    return replace(layout, head_range=None if whole else (heads.start, heads.stop))


def shard_layouts(layout: KVLayout, num_ranks: int) -> list[KVLayout]:
    """Returns the layout of every rank's pages, by rank."""
    return [shard_layout(layout, Shard(rank, num_ranks)) for rank in range(num_ranks)]
