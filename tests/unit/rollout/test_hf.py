"""The transformers engine against a naive sampler that recomputes everything at every token."""

import pytest
import torch
from small import write_model

from bridge.errors import UserError
from bridge.rollout.engine import Completion, Sampling, sample_seed, uniforms
from bridge.rollout.hf import TransformersEngine
from bridge.train.batches import Row, batch_logprobs, collate
from bridge.train.model import load_model

STOP = {1}
VOCABULARY = 17  # one row of the output has no text
PROMPTS = [[5, 14, 6], [2], [9, 9, 9, 9, 15, 2, 4], [7, 8]]
SEEDS = [[sample_seed(q, i) for i in range(n)] for q, n in enumerate((3, 1, 4, 2))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    return load_model(write_model(tmp_path_factory.mktemp("model"), init_std=0.4), torch.device("cpu"))


@torch.no_grad()
def naive(model: torch.nn.Module, prompt: list[int], seed: int, sampling: Sampling) -> Completion:
    ids, logprobs = list(prompt), []
    numbers = uniforms([seed], sampling.max_new_tokens)[0]
    for number in numbers:
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1, :VOCABULARY].double()
        logp = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
        if sampling.temperature == 0:
            token = int(logp.argmax())
        else:
            total, token = 0.0, 0
            for token, p in enumerate(logp.exp().tolist()):  # noqa: B007
                total += p
                if total > number:
                    break
        ids.append(token)
        logprobs.append(float(logp[token]))
        if token in STOP:
            return Completion(ids[len(prompt) :], logprobs, False)
    return Completion(ids[len(prompt) :], logprobs, True)


@pytest.mark.parametrize("sampling", [Sampling(1.0, 1.0, 24), Sampling(0.7, 1.0, 24), Sampling(0.0, 1.0, 24)])
@pytest.mark.parametrize("rows", [256, 4, 1])
def test_it_draws_what_the_naive_sampler_draws(model: torch.nn.Module, sampling: Sampling, rows: int) -> None:
    """Prompts of many lengths, groups cut by the batch size, finished rows dropped on the way."""
    got = TransformersEngine(model, STOP, VOCABULARY, rows).sample(PROMPTS, SEEDS, sampling)
    endings = set()
    for prompt, own, completions in zip(PROMPTS, SEEDS, got, strict=True):
        assert len(completions) == len(own)
        for seed, completion in zip(own, completions, strict=True):
            expected = naive(model, prompt, seed, sampling)
            assert completion.ids == expected.ids
            assert completion.truncated == expected.truncated
            assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
            endings.add(len(completion.ids))
    if sampling.temperature == 1.0:
        assert len(endings) > 2  # otherwise nothing was ever dropped


def test_its_log_probabilities_are_those_of_the_training_forward(model: torch.nn.Module) -> None:
    sampling = Sampling(0.8, 1.0, 20)
    got = TransformersEngine(model, STOP, VOCABULARY).sample(PROMPTS, SEEDS, sampling)
    for prompt, completions in zip(PROMPTS, got, strict=True):
        for completion in completions:
            batch = collate([Row([*prompt, *completion.ids], len(prompt))], torch.device("cpu"))
            trained = batch_logprobs(model, batch, VOCABULARY, 0.8)[batch.mask]
            assert trained.tolist() == pytest.approx(completion.logprobs, abs=1e-4)


def test_completions_end_with_their_stop_token_or_at_the_limit(model: torch.nn.Module) -> None:
    got = TransformersEngine(model, STOP, VOCABULARY).sample(PROMPTS, SEEDS, Sampling(max_new_tokens=16))
    for completion in (c for group in got for c in group):
        assert all(0 <= token < VOCABULARY for token in completion.ids)
        assert not STOP & set(completion.ids[:-1])
        assert completion.truncated == (completion.ids[-1] not in STOP)
        assert len(completion.ids) == 16 if completion.truncated else len(completion.ids) <= 16
        assert len(completion.logprobs) == len(completion.ids)


def test_present_weights_are_used(model: torch.nn.Module) -> None:
    engine = TransformersEngine(model, STOP, VOCABULARY)
    greedy = Sampling(0.0, 1.0, 8)
    before = engine.sample(PROMPTS, [[0]] * 4, greedy)
    weight = next(model.parameters())
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(-1)
    after = engine.sample(PROMPTS, [[0]] * 4, greedy)
    with torch.no_grad():
        weight.copy_(kept)
    assert before != after
    assert engine.sample(PROMPTS, [[0]] * 4, greedy) == before


def test_impossible_requests(model: torch.nn.Module) -> None:
    engine = TransformersEngine(model, STOP, VOCABULARY)
    with pytest.raises(UserError, match=r"longest prompt has 7 tokens.*128 positions"):
        engine.sample(PROMPTS, SEEDS, Sampling(max_new_tokens=122))
    with pytest.raises(UserError, match="no tokens"):
        engine.sample([[]], [[1]], Sampling())
    assert engine.sample([], [], Sampling(max_new_tokens=4)) == []
