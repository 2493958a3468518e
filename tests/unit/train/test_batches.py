"""The stream of rows, masks, and what padding and splitting must not change."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import write_model

from bridge.train.batches import Batch, Row, aligned, batch_logprobs, collate, micro_batches, stream
from bridge.train.losses import sft_loss
from bridge.train.model import load_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    return load_model(write_model(tmp_path_factory.mktemp("model"), init_std=0.5), CPU)


def rows(count: int, seed: int = 0) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(3, 20, (1,), generator=generator))
        ids = torch.randint(0, 18, (length,), generator=generator).tolist()
        made.append(Row(ids, int(torch.randint(1, length, (1,), generator=generator))))
    return made


@given(st.integers(1, 40), st.integers(0, 200), st.integers(0, 100), st.integers(0, 5))
def test_the_stream_is_one_permutation_after_another(size: int, start: int, count: int, seed: int) -> None:
    whole = stream(size, 0, start + count, seed)
    assert stream(size, start, count, seed) == whole[start:]
    for begin in range(0, len(whole) - size + 1, size):
        assert sorted(whole[begin : begin + size]) == list(range(size))


def test_passes_and_seeds_differ() -> None:
    first, second = stream(50, 0, 50, 0), stream(50, 50, 50, 0)
    assert first != second and first != stream(50, 0, 50, 1)


def test_collate_by_hand() -> None:
    batch = collate([Row([5, 6, 7, 8], 2), Row([9, 5, 3], 1)], CPU)
    assert batch.ids.tolist() == [[5, 6, 7, 8], [9, 5, 3, 0]]
    assert batch.first == 0
    assert batch.targets.tolist() == [[6, 7, 8], [5, 3, 0]]
    # row 0 trains 7 and 8 (the tokens from index 2 on); row 1 trains 5 and 3; the padding is not trained
    assert batch.mask.tolist() == [[False, True, True], [True, True, False]]


def test_the_first_answer_token_and_the_last_are_trained() -> None:
    batch = collate([Row([1, 2, 3, 4], 3)], CPU)
    assert batch.first == 2 and batch.targets.tolist() == [[4]] and batch.mask.tolist() == [[True]]


def test_all_tokens_means_all_but_the_first() -> None:
    row = Row([4, 5, 6], 0)
    assert row.targets == 2
    assert int(collate([row], CPU).mask.sum()) == 2


def test_a_pad_value_inside_a_sequence_counts() -> None:
    assert int(collate([Row([3, 0, 0], 1), Row([3, 0, 0, 0, 0], 1)], CPU).mask.sum()) == 2 + 4


def test_values_line_up_with_their_tokens() -> None:
    given_rows = [Row([5, 6, 7, 8], 2), Row([9, 5, 3], 1)]
    batch = collate(given_rows, CPU)
    got = aligned([[0.7, 0.8], [0.5, 0.3]], given_rows, batch)
    assert torch.equal(got, torch.tensor([[0.0, 0.7, 0.8], [0.5, 0.3, 0.0]]))


def test_log_probabilities_are_those_of_an_independent_forward(model: torch.nn.Module) -> None:
    row = rows(1, seed=3)[0]
    logits = model(input_ids=torch.tensor([row.ids])).logits[0].double().log_softmax(-1)
    expected = [logits[i - 1, row.ids[i]].item() for i in range(row.first, len(row.ids))]
    batch = collate([row], CPU)
    assert batch_logprobs(model, batch, 19)[batch.mask].tolist() == pytest.approx(expected, abs=1e-5)


def test_padding_changes_nothing(model: torch.nn.Module) -> None:
    short, long = Row([3, 4, 5, 6], 2), Row(list(range(1, 19)) * 3, 4)
    alone, padded = collate([short], CPU), collate([short, long], CPU)
    one = batch_logprobs(model, alone, 19)[alone.mask]
    both = batch_logprobs(model, padded, 19)
    assert torch.allclose(both[0][padded.mask[0]], one, atol=1e-5)


def test_rows_beyond_the_vocabulary_do_not_count(model: torch.nn.Module) -> None:
    batch = collate([Row([3, 4, 5], 1)], CPU)
    whole = model(input_ids=batch.ids).logits[0, :-1, :10].log_softmax(-1)
    expected = whole.gather(-1, batch.targets[0].unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(batch_logprobs(model, batch, 10)[0], expected, atol=1e-5)


@pytest.mark.parametrize("size", [1, 3, 4, 100])
def test_accumulation_does_not_change_the_gradient(model: torch.nn.Module, size: int) -> None:
    made = rows(10, seed=1)

    def gradient(size: int) -> torch.Tensor:
        model.zero_grad()
        total = sum(row.targets for row in made)
        for part in micro_batches(made, size):
            batch: Batch = collate([made[i] for i in part], CPU)
            sft_loss(batch_logprobs(model, batch, 19), batch.mask, total).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    whole = gradient(10)
    assert whole.norm() > 0.1
    assert torch.allclose(gradient(size), whole, atol=1e-5 * float(whole.abs().max()) + 1e-6)


@given(st.lists(st.integers(2, 30), min_size=1, max_size=40), st.integers(1, 12))
def test_micro_batches_hold_every_row_once(lengths: list[int], size: int) -> None:
    made = [Row([1] * length, 1) for length in lengths]
    parts = list(micro_batches(made, size))
    assert sorted(i for part in parts for i in part) == list(range(len(made)))
    assert all(len(part) <= size for part in parts)
    in_order = [len(made[i].ids) for part in parts for i in part]
    assert in_order == sorted(lengths, reverse=True)
