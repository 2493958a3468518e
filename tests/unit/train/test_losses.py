"""Losses against hand-worked values and the invariants of research on shipped bugs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.train.losses import k3, masked_sum, policy_loss, sft_loss, token_logprobs


def test_token_logprobs_by_hand() -> None:
    # softmax of (0, ln 3) is (1/4, 3/4)
    logits = torch.tensor([[[0.0, math.log(3.0)], [0.0, math.log(3.0)]]])
    got = token_logprobs(logits, torch.tensor([[0, 1]]))
    assert torch.allclose(got, torch.tensor([[math.log(0.25), math.log(0.75)]]))


def test_token_logprobs_at_a_temperature() -> None:
    # at T = 1/2 the logits double: (0, ln 9) gives (1/10, 9/10)
    got = token_logprobs(torch.tensor([[[0.0, math.log(3.0)]]]), torch.tensor([[1]]), temperature=0.5)
    assert got.item() == pytest.approx(math.log(0.9))


def test_token_logprobs_of_half_precision_are_float32() -> None:
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    got = token_logprobs(logits, torch.zeros(2, 3, dtype=torch.long))
    assert got.dtype == torch.float32
    assert torch.allclose(got, logits.double().log_softmax(-1)[..., 0].float(), atol=1e-5)


def test_nan_outside_the_mask_has_no_influence() -> None:
    values = torch.tensor([[1.0, float("nan")]], requires_grad=True)
    total = masked_sum(values * 2, torch.tensor([[True, False]]))
    total.backward()
    assert total.item() == 2.0
    assert values.grad is not None and values.grad[0, 0] == 2.0


def test_sft_loss_by_hand() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -100.0]])
    mask = torch.tensor([[True, True, False]])
    assert sft_loss(logprobs, mask, total=4).item() == pytest.approx(0.75)


def test_policy_loss_by_hand() -> None:
    # ρ = 1.5, 0.5, 1.1 with A = +2: min(3, 2.4), min(1, 1.6), min(2.2, 2.2); only the first is clipped
    old = torch.zeros(1, 3)
    new = torch.tensor([[1.5, 0.5, 1.1]]).log()
    got = policy_loss(new, old, torch.tensor([2.0]), torch.ones(1, 3, dtype=torch.bool), total=3, clip=0.2)
    assert got.loss.item() == pytest.approx(-(2.4 + 1.0 + 2.2) / 3)
    assert got.clipped == 1
    # A = −2: min(−3, −2.4), min(−1, −1.6), −2.2; only the second is clipped
    got = policy_loss(new, old, torch.tensor([-2.0]), torch.ones(1, 3, dtype=torch.bool), total=3, clip=0.2)
    assert got.loss.item() == pytest.approx(-(-3.0 - 1.6 - 2.2) / 3)
    assert got.clipped == 1


def test_a_clipped_token_gives_no_gradient_and_others_give_minus_advantage() -> None:
    new = torch.tensor([[math.log(1.5), 0.0]], requires_grad=True)
    got = policy_loss(new, torch.zeros(1, 2), torch.tensor([2.0]), torch.ones(1, 2, dtype=torch.bool), 2, 0.2)
    got.loss.backward()
    assert new.grad is not None
    assert new.grad.tolist() == [[0.0, -1.0]]  # ρ = 1: −A / total


def test_on_policy_nothing_is_clipped_and_the_loss_is_the_mean_advantage() -> None:
    logprobs = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(4, 5, dtype=torch.bool)
    advantages = torch.tensor([1.0, -1.0, 2.0, -2.0])
    got = policy_loss(logprobs, logprobs, advantages, mask, total=20, clip=0.2)
    assert got.clipped == 0
    assert got.loss.item() == pytest.approx(0.0, abs=1e-6)


def test_the_ratio_stays_finite() -> None:
    got = policy_loss(
        torch.tensor([[500.0]]), torch.tensor([[-500.0]]), torch.tensor([-1.0]), torch.ones(1, 1).bool(), 1, 0.2
    )
    assert math.isfinite(got.loss.item())


def test_k3_by_hand_and_never_negative() -> None:
    # d = ln 2: 1/2 + ln 2 − 1;  d = −ln 2: 2 − ln 2 − 1
    got = k3(torch.tensor([math.log(2.0), -math.log(2.0), 0.0]), torch.zeros(3))
    assert got.tolist() == pytest.approx([math.log(2.0) - 0.5, 1 - math.log(2.0), 0.0])
    wild = k3(torch.randn(1000, generator=torch.Generator().manual_seed(2)) * 30, torch.zeros(1000))
    assert bool((wild >= 0).all()) and bool(wild.isfinite().all())


def test_k3_is_the_kl_in_expectation_and_its_gradient_is_the_forward_one() -> None:
    # Exact enumeration over a vocabulary of 5: no sampling.
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    weights = logp.exp().detach()
    expected = (weights * k3(logp, reference)).sum()
    kl = (logp.exp() * (logp - reference)).sum()
    assert expected.item() == pytest.approx(kl.item())
    (gradient,) = torch.autograd.grad(expected, logits, retain_graph=True)
    forward = (reference.exp() * (reference - logp)).sum()
    (forward_gradient,) = torch.autograd.grad(forward, logits)
    assert torch.allclose(gradient, forward_gradient)


def test_descending_k3_alone_lowers_the_kl() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0], requires_grad=True)
    reference = torch.zeros(3).log_softmax(-1)

    def kl() -> float:
        logp = logits.detach().log_softmax(-1)
        return float((logp.exp() * (logp - reference)).sum())

    before = kl()
    for _ in range(20):
        logp = logits.log_softmax(-1)
        (gradient,) = torch.autograd.grad((logp.exp().detach() * k3(logp, reference)).sum(), logits)
        logits = (logits - 0.1 * gradient).detach().requires_grad_()
    assert kl() < before / 2


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=8), st.integers(1, 8), st.integers(0, 10_000))
def test_micro_batches_add_up_to_the_whole_step(lengths: list[int], size: int, seed: int) -> None:
    """Uneven lengths, any micro-batch size: same loss, same gradient."""
    generator = torch.Generator().manual_seed(seed)
    width, count = max(lengths), len(lengths)
    logits = torch.randn(count, width, 7, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 7, (count, width), generator=generator)
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    advantages = torch.randn(count, generator=generator, dtype=torch.float64)
    old = torch.randn(count, width, generator=generator, dtype=torch.float64) * 0.1 - 2

    def gradient(micro: int) -> tuple[float, torch.Tensor]:
        leaf = logits.clone().requires_grad_()
        loss = torch.zeros((), dtype=torch.float64)
        for start in range(0, count, micro):
            part = slice(start, start + micro)
            logprobs = token_logprobs(leaf[part], targets[part])
            total = int(mask.sum())
            loss = loss + policy_loss(logprobs, old[part], advantages[part], mask[part], total, 0.2).loss
            loss = loss + sft_loss(logprobs, mask[part], total)
        loss.backward()
        assert leaf.grad is not None
        return loss.item(), leaf.grad

    whole, split = gradient(count), gradient(size)
    assert split[0] == pytest.approx(whole[0], rel=1e-6)
    assert torch.allclose(split[1], whole[1], atol=1e-7)
