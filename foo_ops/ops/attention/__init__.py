"""Attention, dense and packed, with caches, its derivatives and rules for torch.vmap."""
