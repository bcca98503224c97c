"""Computes a rank's share of a model under tensor parallelism: its heads, its part of each product, its layout of
pages.

Every rank has all layers and a part of each: query heads and the KV heads that they read, a part of the inner width of
each feed-forward block and of each expert, and a part of the vocabulary. With expert parallelism a rank has some of the
experts whole instead. If there are fewer KV heads than ranks, several ranks hold the same head; a latent (one for all
heads) is held by all. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.cache.kv_layout import KVLayout
from engine.models.config import ModelConfig
from engine.models.expert_config import MXFP4_GROUP
from penstock.config import EngineConfig
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of rank `rank` out of `num_ranks`."""

    rank: int = 0
    num_ranks: int = 1
    has_whole_experts: bool = False  # a part of the experts (expert parallelism), not a part of each

    @classmethod
    def of(cls, config: EngineConfig, rank: int) -> Shard:
        return cls(rank, config.tensor_parallel, config.expert_parallel)

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


def check_expert_parallel(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError if experts cannot be divided among ranks because there are no experts, or a single rank."""
    if not config.expert_parallel:
        return
    if model.experts is None:
        raise ConfigError(
            f"engine.expert_parallel = true: {config.model} has no experts; give engine.expert_parallel = false"
        )
    if config.tensor_parallel == 1:
        raise ConfigError(
            "engine.expert_parallel = true divides experts among ranks, and engine.tensor_parallel = 1 gives one; give "
            "engine.tensor_parallel = 2 or more, or engine.expert_parallel = false"
        )


def check_degree(model: ModelConfig, shard: Shard) -> None:
    """Raises ConfigError unless the model can be split evenly among the ranks."""
    num_ranks = shard.num_ranks
    sizes = {"attention heads": model.num_heads, "of the feed-forward width": model.intermediate_size}
    if model.experts is not None:
        sizes["of the shared experts' width"] = model.experts.shared_size
        if shard.has_whole_experts:
            sizes["experts, and engine.expert_parallel = true keeps each whole"] = model.experts.num_experts
        else:
            sizes["of an expert's width"] = model.experts.intermediate_size
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
    check_degree(model, shard)
    experts = model.experts
    if experts is not None:
        own = shard.span(experts.num_experts) if shard.has_whole_experts else None
        width = experts.intermediate_size if own is not None else experts.intermediate_size // shard.num_ranks
        experts = replace(
            experts, intermediate_size=width, shared_size=experts.shared_size // shard.num_ranks, own_experts=own
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
