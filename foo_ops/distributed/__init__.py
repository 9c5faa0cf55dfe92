"""Attention of sequences that are sharded among the processes of torch.distributed."""

from foo_ops.distributed.ring_attention import ring_attention
from foo_ops.distributed.sequence import gather_sequence, shard_sequence

__all__ = ["gather_sequence", "ring_attention", "shard_sequence"]
