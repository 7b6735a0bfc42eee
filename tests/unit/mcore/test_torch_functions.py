"""Rotation, SwiGLU, RMS norm, grouped products, permutation and packed attention compute what the
operators that they replace do, forward and backward."""

from __future__ import annotations

import functools
import runpy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.mcore.packed_attention import PackedAttention
from hybridflow.mcore.torch_functions import (
    GroupedProduct,
    grouped_linear,
    permute,
    rms_norm,
    rotate,
    rotate_unfused,
    swiglu,
)
from hybridflow.mcore.torch_modules import ExpertCounts

LENGTHS = [8, 24, 8, 16, 0, 4]


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def both(function: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The result, and the gradients of its product with some numbers."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    torch.manual_seed(2)
    out.backward(torch.randn(out.shape).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@functools.cache
def megatrons_rotation() -> Any:
    """From a copy of its module, in which nothing was replaced."""
    from megatron.core.models.common.embeddings import rope_utils

    return runpy.run_path(rope_utils.__file__)["_apply_rotary_pos_emb_thd"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("turned", [8, 6])
def test_the_rotation_is_megatrons(turned: int, size: int, rank: int, dtype: torch.dtype) -> None:
    _apply_rotary_pos_emb_thd = megatrons_rotation()
    torch.manual_seed(1)
    half = torch.randn(max(LENGTHS), 1, 1, turned // 2)
    freqs = torch.cat((half, half), dim=-1)
    cu_seqlens = bounds(LENGTHS)
    t = torch.randn(sum(LENGTHS) // size, 3, 8).to(dtype)
    group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    expected = both(
        lambda leaf: _apply_rotary_pos_emb_thd(leaf, cu_seqlens, freqs, cp_group=group), t
    )
    for found, wanted in zip(
        both(lambda leaf: rotate(leaf, cu_seqlens, freqs, size, rank), t), expected, strict=True
    ):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize(
    "settings", [{"mscale": 1.3}, {"multi_latent_attention": True}, {"rotary_interleaved": True}]
)
def test_the_unfused_rotation_is_megatrons(settings: dict[str, Any], size: int, rank: int) -> None:
    torch.manual_seed(1)
    half = torch.randn(max(LENGTHS), 1, 1, 3)
    # Megatron 0.19 takes no empty sequence with this setting (rope_utils.py:89)
    lengths = [length for length in LENGTHS if length or "rotary_interleaved" not in settings]
    freqs = torch.cat((half, half), dim=-1)
    cu_seqlens = bounds(lengths)
    t = torch.randn(sum(lengths) // size, 3, 8).bfloat16()
    group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    for found, wanted in zip(
        both(lambda leaf: rotate_unfused(leaf, cu_seqlens, freqs, cp_group=group, **settings), t),
        both(
            lambda leaf: megatrons_rotation()(leaf, cu_seqlens, freqs, cp_group=group, **settings),
            t,
        ),
        strict=True,
    ):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("runs", [[3, 0, 9, 4], [16], [0, 0, 16]])
def test_a_grouped_product_is_one_product_a_run(runs: list[int]) -> None:
    """Up to one rounding of bfloat16: both add up in float32."""
    torch.manual_seed(1)
    x = torch.randn(sum(runs), 16).bfloat16()
    weights = [torch.randn(24, 16).bfloat16() for _ in runs]
    ends = torch.tensor(runs).cumsum(0).int()

    def one_by_one(whole: torch.Tensor, *each: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            [F.linear(run, weight) for run, weight in zip(whole.split(runs), each, strict=True)]
        )

    found = both(lambda whole, *each: GroupedProduct.apply(whole, ends, *each), x, *weights)
    expected = both(one_by_one, x, *weights)
    assert len(found) == len(expected) == 2 + len(runs)
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted, rtol=2**-7, atol=2**-7)


def test_frozen_weights_of_a_grouped_product_get_no_gradient() -> None:
    x = torch.randn(4, 8).bfloat16().requires_grad_()
    weights = [torch.randn(8, 8).bfloat16() for _ in range(2)]
    GroupedProduct.apply(x, torch.tensor([1, 4], dtype=torch.int32), *weights).sum().backward()
    assert x.grad is not None and [weight.grad for weight in weights] == [None, None]


@pytest.mark.parametrize("runs", [[2, 0, 3], [0, 0, 0], [5]])
def test_grouped_linears_take_counts_as_a_list_or_on_the_device(runs: list[int]) -> None:
    """A run without rows has a gradient of zero, so that every factor of an adapter has one."""
    torch.manual_seed(2)
    x = torch.randn(sum(runs), 6)
    weights = [torch.randn(4, 6, requires_grad=True) for _ in runs]
    found = grouped_linear(x, runs, weights)
    assert torch.equal(found, grouped_linear(x, ExpertCounts(torch.tensor(runs)), weights))
    wanted = [run @ weight.T for run, weight in zip(x.split(runs), weights, strict=True)]
    torch.testing.assert_close(found, torch.cat(wanted))
    found.sum().backward()
    gradients = [weight.grad for weight in weights]
    assert all(gradient is not None for gradient in gradients)
    assert [bool(gradient.any()) for gradient in gradients if gradient is not None] == [
        run > 0 for run in runs
    ]


def test_the_permutation_is_megatrons() -> None:
    from megatron.core.transformer.moe import moe_utils

    torch.manual_seed(1)
    tokens = torch.randn(12, 5)
    scores = torch.rand(12, 6)
    topk = 2
    chosen = torch.zeros(12, 6).scatter(1, scores.topk(topk).indices, 1).bool()
    arguments = {"routing_map": chosen, "num_out_tokens": 12 * topk}

    def parts(function: Any) -> Any:
        return lambda t, p: torch.cat(
            [part.reshape(-1) for part in function(t, probs=p, **arguments)[:2]]
        )

    ours = functools.partial(permute, None)
    for found, wanted in zip(
        both(parts(ours), tokens, scores),
        both(parts(moe_utils.permute), tokens, scores),
        strict=True,
    ):
        assert torch.equal(found, wanted)
    assert torch.equal(ours(tokens, **arguments)[2], moe_utils.permute(tokens, **arguments)[2])


def test_other_angles_of_the_same_sequences_are_not_taken_for_the_first() -> None:
    t = torch.randn(sum(LENGTHS), 1, 8)
    cu_seqlens = bounds(LENGTHS)
    first = torch.randn(24, 1, 1, 8)
    second = torch.randn(24, 1, 1, 8)
    rotate(t, cu_seqlens, first)
    assert torch.equal(rotate(t, cu_seqlens, second), rotate(t, bounds(LENGTHS), second))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_is_the_product_of_its_parts(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = torch.randn(40, 1, 96).to(dtype)

    def parts(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    for found, wanted in zip(both(swiglu, x), both(parts, x), strict=True):
        assert torch.equal(found, wanted)
    with torch.no_grad():
        assert torch.equal(swiglu(x), parts(x))


@pytest.mark.parametrize("shape", [(7, 1, 96), (5, 1, 3, 16), (0, 1, 8)])
def test_the_norm_is_torchs_up_to_rounding(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    x = torch.randn(shape, dtype=torch.float64)
    weight = torch.randn(shape[-1], dtype=torch.float64)
    x[:1] *= 1e-4  # where eps counts

    def torchs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, shape[-1:], weight, 1e-6)

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, 1e-6)

    for dtype, close in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.0)):
        given = x.to(dtype), weight.to(dtype)
        for found, wanted in zip(both(ours, *given), both(torchs, *given), strict=True):
            assert found.dtype == wanted.dtype
            torch.testing.assert_close(found, wanted, rtol=close, atol=close)


def test_the_norm_of_a_part_of_a_wider_tensor() -> None:
    """Queries and keys are views of one projection, whose rows are not next to each other."""
    torch.manual_seed(1)
    whole = torch.randn(6, 1, 2, 24)
    weight = torch.randn(8)
    for found, wanted in zip(
        both(lambda leaf, weight: rms_norm(leaf[..., 8:16], weight, 1e-6), whole, weight),
        both(lambda leaf, weight: F.rms_norm(leaf[..., 8:16], (8,), weight, 1e-6), whole, weight),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_each_packed_sequence_attends_to_itself_alone() -> None:
    torch.manual_seed(1)
    lengths = [5, 1, 8, 3, 7, 8]
    query, key, value = (torch.randn(sum(lengths), heads, 8) for heads in (4, 2, 2))
    config = SimpleNamespace(
        context_parallel_size=1,
        softmax_scale=None,
        softmax_type="vanilla",
        window_size=None,
        window_attn_skip_freq=None,
    )
    layer = PackedAttention(config, 1)
    params = SimpleNamespace(qkv_format="thd", bounds=bounds(lengths).long())

    def one_by_one(*whole: torch.Tensor) -> torch.Tensor:
        outs = []
        for parts in zip(*(tensor.split(lengths) for tensor in whole), strict=True):
            one = (part.transpose(0, 1)[None] for part in parts)
            out = F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)
            outs.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(outs)

    found = both(lambda *whole: layer(*whole, packed_seq_params=params), query, key, value)
    for one, wanted in zip(found, both(one_by_one, query, key, value), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-6)
