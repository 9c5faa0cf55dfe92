"""Attention of one sequence in float64, with the options of flash_attn."""

import math

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def make(*shapes, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return made if len(made) > 1 else made[0]


def expected(
    q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, softmax_scale=None, alibi_slopes=None
):
    """Return one sequence's attention for q (Sq, H, D), k and v (Sk, Hkv, D), slopes (H,)."""
    q, k, v = (tensor.cpu().double() for tensor in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k)
    scores = scores * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.cpu().double()[:, None, None] * distance.abs()
    left, right = window_size
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        right = 0
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= -distance > right
    scores = scores.masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("hij,jhd->ihd", weights, v), scores.logsumexp(-1)


def assert_near(found, wanted, dtype):
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=tolerance, atol=tolerance)
